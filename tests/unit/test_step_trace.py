"""What is made of measured passes: imbalance and bubble; and that what a run reports ends no training."""

import errno
import itertools
import json
import logging
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from slicing import PACKINGS, planner

from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.plan import MicroBatch, Plan
from wlb_titan.runtime.metrics import JsonLines, MetricsProcessor
from wlb_titan.runtime.step_trace import PassTimer, StepTrace, measured_imbalance
from wlb_titan.simulator import calibrate
from wlb_titan.simulator.measured import Pass, bubble, step_parts
from wlb_titan.summary import rank_imbalance

pytestmark = pytest.mark.slow

# Two ranks of a pipeline, micro-batches of 3 and 6 seconds a rank; rank 1 waits one second and rank 0 for it.
ROWS = [("F", 0, 0, 0, 1), ("F", 0, 1, 1, 2), ("B", 0, 0, 4, 2), ("B", 0, 1, 9, 4)]
FIRST = [Pass(*row, "dp 0", "pp 0") for row in ROWS]
ROWS = [("F", 1, 0, 1, 0.5), ("L", 1, 0, 1.5, 0.5), ("B", 1, 0, 2, 2), ("F", 1, 1, 4, 2), ("B", 1, 1, 6, 4)]
SECOND = [Pass(*row, "dp 0", "pp 1") for row in ROWS]


def pack(index, dp_rank=0, passes="FB", length=8):
    documents = np.array([[0, 0, 7, 0], [1, 0, 1, 0]])
    facts = {"passes": passes, "length": length, "workload": 5.0 + index}
    return MicroBatch(documents, dp_rank=dp_rank, index=index, **facts)


def plan_of(*packs):
    return Plan(0, packs, 0.0)


PLAN = plan_of(pack(0), pack(1))


def test_bubble_is_the_idle_share_between_the_first_pass_and_the_last():
    assert bubble(FIRST + SECOND) == pytest.approx(1 - 18 / 26)
    assert bubble(SECOND) == 0.0


def test_parts_of_a_step_add_up_to_it_and_what_is_left_is_waiting():
    """The last pass ends at 13 s. Rank 1 computed until 10 s, and ends 1 s later than rank 0."""
    beside = [Pass("loading", 0, 0, 0, 0.5, "dp 0", "pp 1"), Pass("optimizer", 0, 0, 13, 1, "dp 0", "pp 0")]
    beside += [Pass("optimizer", 0, 0, 13, 1, "dp 0", "pp 1"), Pass("rest", 0, 0, 14, 1, "dp 0", "pp 1")]
    parts = step_parts(FIRST + SECOND + beside)
    assert parts == {
        **{"forward": (3 + 2.5) / 2, "backward": (6 + 6) / 2, "loss": 0.25},
        **{"loading": 0.25, "optimizer": 1, "rest": 0.5, "waiting": (4 + 4) / 2 - 0.25},
    }
    assert sum(parts.values()) == (14 + 15) / 2
    assert step_parts(FIRST + SECOND)["waiting"] == (4 + 4.5) / 2 - 0.25


@pytest.mark.parametrize(("steps", "noise"), [(5, "1.20x to 1.60x"), (8, "1.30x to 1.50x")])
def test_a_rank_is_named_once_it_is_slow_in_most_steps_and_noise_last(steps, noise, caplog, monkeypatch):
    trace, named = StepTrace(PassTimer(torch.device("cpu")), 1, "run", 0), iter("01 1000 0")
    found = ({name: 1.2 + step / 10} if name != " " else {} for step, name in enumerate(named))
    monkeypatch.setattr(calibrate, "slow_ranks", lambda passes, factors: next(found))
    with caplog.at_level(logging.INFO):
        for _ in range(steps):
            trace._beside_predictions([replace(FIRST[0], facts={calibrate.PARTS: [1] + 5 * [0]})], np.ones(5))
        trace.close()
    said = [r.getMessage() for r in caplog.records if "equal work" in r.getMessage()]
    assert [text.partition(" of what")[0] for text in said[:-1]] == ["0 takes 1.80x"] * (steps == 8)
    assert f"took {noise} of what equal work takes elsewhere" in said[-1]


def test_imbalance_is_of_whole_micro_batches_over_stages_and_replicas_and_shared_ones_count_once():
    assert measured_imbalance(FIRST + SECOND, PLAN) == pytest.approx(12 / 9)
    replica = [replace(one, replica="dp 1") for one in FIRST]
    plan = plan_of(*PLAN.micro_batches, pack(0, 1), pack(1, 1))
    found = measured_imbalance(FIRST + SECOND + replica, plan)
    assert found == pytest.approx(12 / np.mean([6, 12, 3, 6]))
    pair = [Pass("FB", 0, i, 2 * i, 2 + 2 * i, "dp 0", f"cp {cp}") for cp in range(2) for i in range(2)]
    assert measured_imbalance(pair, PLAN) == pytest.approx(4 / 3)


def test_passes_may_have_micro_batches_of_their_own():
    """Forward passes take 1.5 and 4 seconds on both ranks, the others 4.5 and 8."""
    plan = plan_of(pack(0, passes="F"), pack(1, passes="F"), *(pack(i, 0, "B", 16) for i in (2, 3)))
    passes = [replace(one, micro_batch=one.micro_batch + 2 * (one.kind != "F")) for one in FIRST + SECOND]
    assert measured_imbalance(passes, plan) == pytest.approx((4 + 8) / (2.75 + 6.25))


def test_imbalance_is_of_both_passes():
    lengths = np.random.default_rng(1).integers(4, 64, size=200)
    degrees = Degrees(shard=2, pipeline=2)
    plan = planner(lengths, PACKINGS["asymmetric"], micro_batches=16, degrees=degrees).next()
    work = np.array([[m.workload for m in plan.micro_batches if m.passes == kind] for kind in "FB"])
    assert plan.imbalance == pytest.approx(work.max(axis=1).sum() / work.mean(axis=1).sum())
    figures = rank_imbalance(plan, None)
    replicas = work.reshape(2, 2, 6).sum(axis=(0, 2))
    assert figures["imbalance_dp"] == pytest.approx(replicas.max() / replicas.mean())
    assert plan.longest == max(m.length for m in plan.micro_batches)


def test_the_timer_measures_only_while_it_is_on():
    timer = PassTimer(torch.device("cpu"))
    timer.clock = itertools.count().__next__  # each look at it takes a second
    with timer.time("F", 0, 0):
        pass
    timer.start()
    with timer.time("F", 0, 0):
        pass
    timer.first = 4
    with timer.time("L", 1, 3):
        assert timer.latest == "L7 of stage 1"
    passes = timer.stop()
    found = [(p.kind, p.stage, p.micro_batch, p.start, p.seconds) for p in passes]
    assert found == [("F", 0, 0, 1, 1), ("L", 1, 7, 3, 1)]
    timer.start()
    timer.keep("rest", timer.kept)
    with timer.time("loading"):
        assert timer.latest == "L7 of stage 1", "it is no pass"
    assert [p.kind for p in timer.stop()] == ["rest", "loading"]


def test_a_full_disk_behind_tensorboard_ends_no_run(tmp_path, caplog, monkeypatch):
    """Neither where a validation is reported nor at the end, where TensorBoard raises once more."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    metrics = MetricsProcessor.__new__(MetricsProcessor)
    metrics.logger = SimpleNamespace(log=full, close=full)
    metrics.reports = True
    metrics._lines = JsonLines(tmp_path / "steps")
    metrics._validation_lines = JsonLines(tmp_path / "validations")
    monkeypatch.setattr("torchtitan.tools.logging._logged", set())
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    metrics.log_validation(1.5, 3, {})
    metrics.close()
    assert caplog.text.count("log cannot be written: [Errno 28] No space left on device") == 1
    assert json.loads((tmp_path / "validations").read_text()) == {"step": 3, "loss": 1.5}
