"""Cost models: operations counted by hand, what every one of them must hold, refusals."""

from dataclasses import replace

import numpy as np
import pytest

from wlb_titan.cost.cluster import load_cluster
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.cost.workload import Analytic, Quadratic, cost_model, workload
from wlb_titan.errors import UserError
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((f"quadratic:{numbers}", "malformed") for numbers in ("1", "a,b", "1,2,3", "")),
        *((f"quadratic:{numbers}", "not both 0") for numbers in ("-1,2", "0,0", "nan,1", "inf,1")),
        ("analytical", "no cost model is called 'analytical'.*Did you mean 'analytic'"),
        ("analytic:3", "takes nothing after its name"),
    ],
)
def test_what_is_no_cost_model_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        cost_model(text, JOB)
