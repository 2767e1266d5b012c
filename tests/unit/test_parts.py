"""The parts of a predicted step add up to it, whatever the schedule, policy, sharers and dimensions."""

from dataclasses import replace

import numpy as np
import pytest
from planning import DOCUMENTS, FULL, JOBS, NONE, job, job_of
from test_groups import divided, planned

from wlb_titan.layers.recompute import MemorySettings
from wlb_titan.packing.predicted import part_seconds, pass_seconds
from wlb_titan.simulator.step import simulate

WAITING = {"waiting in the pipeline", "waiting for replicas"}


@pytest.mark.parametrize("kind", ["none", "keys", "selective", "full"])
@pytest.mark.parametrize("name", JOBS)
def test_parts_add_up(name, kind):
    one = job_of(name)
    if name not in ("asymmetric", "zero bubble"):
        one = replace(one, memory=MemorySettings(checkpointing=kind))
    plans = one.plans(DOCUMENTS, 3)
    prediction = simulate(one, plans)
    parts = prediction.parts()
    assert sum(parts.values()) == pytest.approx(prediction.seconds.mean())
    assert all(seconds > -1e-9 * prediction.seconds.mean() for seconds in parts.values()), parts
    waited = sum(parts[name] for name in WAITING)
    idle = prediction.bubble * prediction.seconds.mean() - prediction.communication.mean()
    if one.degrees.pipeline > 1:
        assert waited == pytest.approx(idle)
    else:  # where replicas meet in each layer, the bubble counts that as computing
        assert waited > idle - 1e-9 and parts["waiting in the pipeline"] == pytest.approx(0, abs=1e-9)
    for plan in plans:
        found = sum(part_seconds(one, plan.micro_batches).values())
        np.testing.assert_allclose(found, pass_seconds(one, plan.micro_batches), rtol=1e-12)


def test_nothing_is_repeated_where_all_is_kept_and_a_forward_pass_in_full():
    one = replace(job_of("tensor"), memory=NONE)
    (plan,) = one.plans(DOCUMENTS, 1)
    parts = part_seconds(one, plan.micro_batches)
    assert np.abs(parts["recomputed"]).max() < 1e-12 * pass_seconds(one, plan.micro_batches).max()
    again = part_seconds(replace(one, memory=FULL), plan.micro_batches)["recomputed"]
    forward = pass_seconds(one, plan.micro_batches)[0] - parts["head"][0]
    np.testing.assert_allclose(again[1], forward)


def test_groups_take_from_the_exchange_what_attention_hides():
    exchanges, attention = [], []
    for groups in (1, 2):
        one = divided(groups)
        parts = part_seconds(one, planned(one))
        exchanges.append(parts["context parallelism"].sum())
        attention.append(parts["attention"].sum() + parts["slowest CP rank"].sum())
    assert exchanges[1] < exchanges[0] and attention[1] >= attention[0]


def test_one_gpu_waits_for_nobody():
    own = replace(job(), cluster=job_of("data").cluster)
    parts = simulate(own, own.plans(DOCUMENTS, 1)).parts()
    everywhere = {"attention", "products", "element-wise", "head", "optimizer"}
    assert {name for name, seconds in parts.items() if seconds > 1e-12} == everywhere
