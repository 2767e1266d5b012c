"""Steps put together from measured passes: what was measured as predicted comes out as predicted."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from planning import DOCUMENTS, JOBS, job_of

from wlb_titan.job import Policy
from wlb_titan.layers.passes import pass_times
from wlb_titan.packing.predicted import attention_seconds, pass_seconds, passing
from wlb_titan.pipeline.graph import PassTimes
from wlb_titan.plan import Action
from wlb_titan.simulator.measured import MeasuredStep, Pass, measured, without_waiting
from wlb_titan.simulator.step import simulate


def ran(job, plan, number, of_all, factor=1.0, stages=None):
    """What every rank would measure of a step if passes took `factor` times their predicted computation."""
    each = len(plan.micro_batches) // job.degrees.data
    kinds = "FIW" if job.schedule == "ZBVZeroBubble" else "FB"
    packs = [m for plan in of_all for m in plan.micro_batches]
    times = PassTimes(*pass_seconds(job.on(without_waiting(job.cluster)), packs)[..., None])
    found = []
    for dp, cp in product(range(job.degrees.data), range(job.degrees.context)):
        passes = []
        for stage, index, kind in product(stages or range(len(job.layers)), range(each), kinds):
            place = number * len(plan.micro_batches) + dp * each + index
            seconds = float(times.of(Action(kind, stage, place))[0])
            passes.append(Pass(kind, stage, index, 0.0, factor * seconds))
        found.append(MeasuredStep(dp, cp, passes, 0.5))
    return found


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.long
def test_what_was_measured_as_predicted_comes_out_as_predicted(name):
    job = job_of(name)
    plans = job.plans(DOCUMENTS, 2)
    alone = simulate(job, plans)
    found = measured(job, plans, [ran(job, plan, k, plans) for k, plan in enumerate(plans)])
    together = simulate(job, plans, found)
    # Every context-parallel rank is as slow as the slowest here, whose backward passes have other shares.
    near = {"rtol": 1e-7 if job.degrees.context == 1 else 2e-3}
    np.testing.assert_allclose(together.seconds - 0.5, alone.seconds - alone.optimizer, **near)
    np.testing.assert_allclose(together.busy - 0.5, alone.busy - alone.optimizer, **near)
    assert (together.optimizer == 0.5).all()


@pytest.mark.parametrize("name", ["pipeline", "slices", "asymmetric"])
def test_stages_that_did_not_run_take_what_a_like_stage_took(name):
    """One stage measured three times as slow: so are all."""
    job = job_of(name)
    plans = job.plans(DOCUMENTS, 2)
    last = len(job.layers) - 1
    found, everywhere = (
        measured(job, plans, [ran(job, plan, k, plans, 3.0, stages) for k, plan in enumerate(plans)])
        for stages in ([0, last], None)
    )
    near, expected = (simulate(job, plans, each).seconds for each in (found, everywhere))
    np.testing.assert_allclose(near, expected)


@pytest.mark.parametrize(("name", "kind"), [("pipeline", "F"), ("asymmetric", "B")])
def test_a_loss_counts_as_forward_or_as_backward_where_that_has_packs_of_its_own(name, kind):
    job = job_of(name)
    (plan,) = plans = job.plans(DOCUMENTS, 1)
    ranks, apart = ran(job, plan, 0, plans), []
    for rank in ranks:
        passes = [replace(one, seconds=one.seconds / 2) if one.kind == kind else one for one in rank.passes]
        losses = [replace(one, kind="L") for one in passes if one.kind == kind]
        apart.append(replace(rank, passes=passes + losses))
    found, expected = (measured(job, plans, [each])[0].seconds for each in (apart, ranks))
    np.testing.assert_allclose(found, expected)


def test_a_replica_that_did_not_run_takes_what_is_predicted_times_how_slow_the_other_was():
    job = job_of("data")
    plans = job.plans(DOCUMENTS, 1)
    ranks = ran(job, plans[0], 0, plans, 2.0)
    (expected,) = measured(job, plans, [ranks])
    (found,) = measured(job, plans, [[rank for rank in ranks if rank.dp == 0]])
    np.testing.assert_allclose(found.seconds, expected.seconds)


def test_a_micro_batch_in_one_piece_is_divided_and_one_context_parallel_rank_scaled_to_the_slowest():
    """Rank 0 alone takes what is predicted of it: so does the slowest rank then."""
    job = job_of("context").under(Policy("plain", "per_sequence"))
    plans = job.plans(DOCUMENTS, 1)
    quiet = job.on(without_waiting(job.cluster))
    attention = [attention_seconds(m, quiet) for m in plans[0].micro_batches]
    assert any(own[0].sum() < 0.95 * own.max(axis=0).sum() for own in attention)
    forward, backward = np.array([own[0] for own in attention]).T[..., None]
    whole = passing(plans[0].micro_batches, quiet).in_runs(4)
    own = pass_times(quiet, replace(whole, forward=forward, backward=backward))
    whole = (own.forward + own.inputs + own.weights)[0, :, 0].tolist()
    rank = MeasuredStep(0, 0, [Pass("FB", 0, i, 0.0, s) for i, s in enumerate(whole)], 0.0)
    found, predicted = measured(job, plans, [[rank]])[0].seconds, pass_seconds(job, plans[0].micro_batches)
    np.testing.assert_allclose(found[0], predicted[0])
    np.testing.assert_allclose(found[1] + found[2], predicted[1] + predicted[2])


def test_ranks_of_a_micro_batch_wait_for_each_other_between_collectives():
    job = job_of("context")
    (plan,) = plans = job.plans(DOCUMENTS, 1)
    pieces = np.random.default_rng(0).uniform(1, 2, (2, len(plan.micro_batches), 3))
    ranks = []
    for cp, own in enumerate(pieces.tolist()):
        passes = [Pass("FB", 0, i, 0.0, sum(x), pieces=x) for i, x in enumerate(own)]
        ranks.append(MeasuredStep(0, cp, passes, 0.5))
    waiting = measured(job, plans, [ranks])[0].seconds
    found = measured(job.on(without_waiting(job.cluster)), plans, [ranks])[0].seconds
    np.testing.assert_allclose(found.sum(axis=(0, 1)), pieces.max(axis=0).sum(axis=1))
    assert (waiting > found).any()


def test_collectives_that_were_counted_take_the_place_of_predicted_ones():
    job = job_of("tensor")
    (plan,) = plans = job.plans(DOCUMENTS, 1)
    ranks = ran(job, plan, 0, plans)

    def with_waits(seconds):
        passes = [[replace(one, waited=seconds * (1 + rank.cp)) for one in rank.passes] for rank in ranks]
        counted = [replace(rank, passes=own) for rank, own in zip(ranks, passes, strict=True)]
        return measured(job, plans, [counted])[0].seconds

    free = measured(replace(job, tensor_overlap=1.0), plans, [ranks])[0].seconds
    assert (measured(job, plans, [ranks])[0].seconds.sum(axis=0) > free.sum(axis=0)).all()
    np.testing.assert_allclose(with_waits(0.0), free)
    # Forward and backward each waited; of two context-parallel ranks the one that waits longer counts.
    np.testing.assert_allclose(with_waits(0.5).sum(axis=0), free.sum(axis=0) + 2 * 0.5 * 2)


@pytest.mark.parametrize("name", ["data", "context"])
def test_where_nothing_runs_behind_passes_no_communication_is_predicted_besides(name):
    job = replace(job_of(name), overlap=False)
    (plan,) = plans = job.plans(DOCUMENTS, 1)
    ranks = ran(job, plan, 0, plans)
    waits = [replace(rank, passes=[replace(one, waited=0.25) for one in rank.passes]) for rank in ranks]
    quiet = simulate(job.on(without_waiting(job.cluster)), plans)
    found, predicted = (simulate(job, plans, measured(job, plans, [own])) for own in (waits, ranks))
    assert found.communication == 0 and predicted.communication > 0
    # Of each micro-batch of the slowest replica the forward pass waited, and the backward pass.
    waited = 2 * 0.25 * len(plan.micro_batches) / job.degrees.data
    np.testing.assert_allclose(found.pipeline, quiet.pipeline + waited, rtol=2e-3)
