"""Cost models: operations counted by hand, what every one of them must hold, profiles, refusals."""

from dataclasses import replace

import numpy as np
import pytest

from wlb_titan.cost.attention_latency import KernelCost, Tiling
from wlb_titan.cost.cluster import load_cluster
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.cost.profile import Entry, Profile
from wlb_titan.cost.workload import Analytic, ProfileCost, Quadratic, cost_model, workload
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


def parallel(tensor, context, model=SHAPE):
    return cost_model("analytic", replace(JOB, model=model, degrees=Degrees(tensor=tensor, context=context)))


def test_quadratic():
    lengths = np.array([1, 10, 131072])
    model = Quadratic(2.0, 3.0)
    assert workload(model, lengths).tolist() == [5.0, 230.0, 2.0 * 131072**2 + 3.0 * 131072]
    assert model.backward(lengths) / model.forward(lengths) == pytest.approx([2.0] * 3)


def test_analytic_counts_the_operations_of_llama2_7b():
    assert SHAPE.linear_weights == 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    model = Analytic(JOB, PLAIN)
    d = np.array([1000])
    attention = 2 * 1000**2 * 4096 * 32
    linear = 2 * SHAPE.linear_weights * 1000
    assert model.forward(d)[0] == pytest.approx(attention + linear)
    assert model.backward(d)[0] == pytest.approx(2.5 * attention + 2 * linear)
    assert SHAPE.flops(d) == 3 * (attention + linear)


def test_a_window_makes_the_work_of_its_layers_linear():
    """Counted pair by pair: d^2 is twice the lower triangle but for half of its diagonal."""
    shape = replace(SHAPE, windows=((7, 30), (100, 1)))
    lengths = np.array([1, 5, 7, 8, 60])
    for d, squares in zip(lengths, shape.squares(lengths), strict=True):
        pairs = [sum(min(row + 1, w) for row in range(d)) for w in (7, 100, d)]
        exact = 30 * pairs[0] + pairs[1] + pairs[2]
        assert squares == 2 * exact - (30 * min(7, d) + 2 * d)
    d = np.array([100_000])
    model, full = Analytic(replace(JOB, model=shape), PLAIN), Analytic(JOB, PLAIN)
    attention = [m.forward(d)[0] - m.linear_forward * d[0] for m in (model, full)]
    assert attention[0] == pytest.approx(attention[1] / 32, rel=0.01)


def test_values_may_have_another_head_dim():
    latent = replace(SHAPE, head_dim=192, v_head_dim=128, projections=0)
    assert latent.linear_weights == 32 * 3 * 4096 * 11008 + 4096 * 32000
    d = np.array([1000])
    assert latent.flops(d) == 3 * (2 * latent.linear_weights * 1000 + 1000**2 * 32 * 32 * (192 + 128))


@pytest.mark.parametrize(("size", "tensor", "context"), [("550M", 2, 2), ("7B", 8, 2), ("70B", 16, 4)])
def test_work_is_superlinear_and_more_so_in_the_backward_pass(size, tensor, context):
    model = parallel(tensor, context, PAPER_MODELS[size])
    lengths = np.array([1024, 65536])
    per_token = [seconds(lengths) / lengths for seconds in (model.forward, model.backward)]
    forward, backward = (long / short for short, long in per_token)
    assert 1.1 < forward < backward


def test_parallelism_divides_the_work_and_adds_communication():
    alone, divided = parallel(1, 1), parallel(8, 2)
    d = np.array([131072])
    assert divided.linear_forward > alone.linear_forward / 16
    assert alone.forward(d)[0] / 16 < divided.forward(d)[0] < alone.forward(d)[0]


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
    """One document of 256 tokens: two tiles that see one block and two, by 32 heads on 100 units."""
    model = cost_model(str(profile), JOB)
    assert isinstance(model, ProfileCost)
    counted = cost_model("analytic", JOB)
    attention = 32 * (2 * 2e-6 + 3 * 1e-6) * 32 / 100
    d = np.array([256])
    assert model.forward(d) == pytest.approx(attention + 256 * counted.linear_forward)
    assert model.backward(d) == pytest.approx(attention + 256 * counted.linear_backward)
    assert cost_model(f"profile:{profile}", JOB).backward(d) == model.backward(d)
    assert not recwarn


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((f"quadratic:{numbers}", "malformed") for numbers in ("1", "a,b", "1,2,3", "")),
        *((f"quadratic:{numbers}", "must be from 0 to") for numbers in ("-1,2", "0,0", "nan,1", "inf,1")),
        ("none.json", "cannot be read: No such file"),
        ("analytical", "no cost model is called 'analytical'.*Did you mean 'analytic'"),
        ("analytic:3", "takes nothing after its name"),
    ],
)
def test_what_is_no_cost_model_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        cost_model(text, JOB)


def test_a_profile_of_other_attention_is_refused(profile):
    with pytest.raises(PlanError, match=r"no attention of .*float16"):
        cost_model(str(profile), replace(JOB, dtype="float16"))
