"""Cost models: hand-computed values, passes, profiles."""

from dataclasses import replace

import numpy as np
import pytest

from wlb_titan.cost.analytic import Analytic
from wlb_titan.cost.attention_latency import KernelCost, Tiling
from wlb_titan.cost.cluster import load_cluster
from wlb_titan.cost.measured import Measured
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.cost.profile import AttentionShape, Entry, Profile
from wlb_titan.cost.quadratic import Quadratic
from wlb_titan.cost.workload import cost_model, workload
from wlb_titan.errors import PlanError, UserError
from wlb_titan.job import Job

SHAPE = PAPER_MODELS["7B"]
JOB = Job(window=4096, micro_batches=1, model=SHAPE)
PLAIN = replace(
    load_cluster("h100_roce"),
    attention_flops=1.0,
    attention_backward_flops=1.0,
    linear_flops=1.0,
    memory_bandwidth=np.inf,
)


def test_quadratic():
    lengths = np.array([1, 10, 131072])
    model = Quadratic(2.0, 3.0)
    assert workload(model, lengths).tolist() == [5.0, 230.0, 2.0 * 131072**2 + 3.0 * 131072]
    assert model.backward(lengths) / model.forward(lengths) == pytest.approx([2.0] * 3)


def test_analytic_counts_the_operations_of_llama2_7b():
    assert SHAPE.linear_weights == 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    model = Analytic(SHAPE, PLAIN)
    d = np.array([1000])
    attention = 2 * 1000**2 * 4096 * 32
    linear = 2 * SHAPE.linear_weights * 1000
    assert model.forward(d)[0] == pytest.approx(attention + linear)
    assert model.backward(d)[0] == pytest.approx(2.5 * attention + 2 * linear)


def test_a_window_makes_the_work_of_its_layers_linear():
    """Counted pair by pair: d^2 is twice the lower triangle but for half of its diagonal."""
    shape = replace(SHAPE, windows=((7, 30), (100, 1)))
    lengths = np.array([1, 5, 7, 8, 60])
    for d, squares in zip(lengths, shape.squares(lengths), strict=True):
        pairs = [sum(min(row + 1, w) for row in range(d)) for w in (7, 100, d)]
        exact = 30 * pairs[0] + pairs[1] + pairs[2]
        assert squares == 2 * exact - (30 * min(7, d) + 2 * d)
    assert SHAPE.squares(lengths) == pytest.approx(32 * lengths**2)
    d = np.array([100_000])
    model, full = Analytic(shape, PLAIN), Analytic(SHAPE, PLAIN)
    attention = [m.forward(d)[0] - m.linear_forward * d[0] for m in (model, full)]
    assert attention[0] == pytest.approx(attention[1] / 32, rel=0.01)
    assert shape.flops(d) < SHAPE.flops(d)


def test_values_may_have_another_head_dim():
    latent = replace(SHAPE, head_dim=192, v_head_dim=128, projections=0)
    d = np.array([1000])
    expected = 3 * (2 * latent.linear_weights * 1000 + 1000**2 * 32 * 32 * (192 + 128))
    assert latent.flops(d) == expected
    assert latent.linear_weights == 32 * 3 * 4096 * 11008 + 4096 * 32000


def test_attention_weighs_more_in_the_backward_pass():
    model = Analytic(SHAPE, tensor_parallel=8, context_parallel=2)
    long, short = np.array([131072]), np.full(128, 1024)
    assert model.forward(long).sum() / model.forward(short).sum() < (
        model.backward(long).sum() / model.backward(short).sum()
    )


def test_communication_makes_the_linear_part_larger():
    alone = Analytic(SHAPE)
    parallel = Analytic(SHAPE, tensor_parallel=8, context_parallel=2)
    assert parallel.linear_forward * 16 > alone.linear_forward
    d = np.array([131072])
    assert parallel.forward(d)[0] < alone.forward(d)[0]


@pytest.mark.parametrize(("size", "tensor", "context"), [("550M", 2, 2), ("7B", 8, 2), ("70B", 16, 4)])
def test_work_is_superlinear(size, tensor, context):
    model = Analytic(PAPER_MODELS[size], tensor_parallel=tensor, context_parallel=context)
    per_token = workload(model, np.array([1024, 65536])) / [1024, 65536]
    assert per_token[1] > 1.3 * per_token[0]


@pytest.mark.parametrize("text", ["quadratic:1", "quadratic:a,b", "quadratic:1,2,3", "quadratic:"])
def test_malformed_quadratic(text):
    with pytest.raises(PlanError, match="malformed"):
        cost_model(text, JOB)


@pytest.mark.parametrize("text", ["quadratic:-1,2", "quadratic:0,0", "quadratic:nan,1", "quadratic:inf,1"])
def test_quadratic_without_work(text):
    with pytest.raises(PlanError, match="must be from 0 to"):
        cost_model(text, JOB)


@pytest.fixture
def profile(tmp_path):
    cost = KernelCost(Tiling(128, 128), launch=1e-5, key=0.0, segment=0.0, tile=2e-6, block=1e-6, masked=0.0)
    entries = tuple(
        Entry(128, 1, "bfloat16", direction, cost, (), "triton") for direction in ("forward", "backward")
    )
    path = tmp_path / "profile.json"
    Profile("some GPU", 100, "test", entries).save(path)
    return path


def test_a_profile_gives_attention_and_counting_the_rest(profile, recwarn):
    model = cost_model(str(profile), JOB)
    assert isinstance(model, Measured)
    same = cost_model(f"profile:{profile}", JOB)
    d = np.array([4096, 131072])
    latency = Profile.load(profile).latency(AttentionShape.of(SHAPE, 1))
    attention = latency.work(d, d)[0] * 32
    assert model.forward(d) == pytest.approx(attention + Analytic(SHAPE).linear_forward * d)
    assert same.backward(d).tolist() == model.backward(d).tolist()
    assert not recwarn


def test_a_missing_profile_is_refused(tmp_path):
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        cost_model(str(tmp_path / "none.json"), JOB)


def test_a_foreign_profile_is_refused(profile):
    with pytest.raises(PlanError, match=r"no attention of .*float16"):
        cost_model(str(profile), replace(JOB, dtype="float16"))


def test_an_unknown_cost_model_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"no cost model is called 'analytical'.*Did you mean 'analytic'"):
        cost_model("analytical", JOB)
    with pytest.raises(PlanError, match="takes nothing after its name"):
        cost_model("analytic:3", JOB)
