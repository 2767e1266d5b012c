"""Measured passes beside predictions: a profile fitted to them predicts them, and a slow rank is named."""

from dataclasses import replace

import numpy as np
import pytest
from planning import DOCUMENTS, job_of

from wlb_titan.packing.predicted import pass_seconds
from wlb_titan.simulator import calibrate
from wlb_titan.simulator.measured import Pass

SLOWER = {"forward": 1.4, "backward": 0.7, "linear": 2.0, "layer": (2e-5, 5e-5)}


def truth(job):
    """What the job's passes follow from on another machine than predictions know."""
    cluster, latency = job.cluster, job.latency
    rates = {name: getattr(cluster, name) / SLOWER["linear"] for name in ("linear_flops", "memory_bandwidth")}
    kernels = {way: getattr(latency, way).slower(SLOWER[way]) for way in ("forward", "backward")}
    cluster = replace(cluster, layer=SLOWER["layer"], **rates)
    return replace(job, cluster=cluster, attention=replace(latency, **kernels))


def passes_of(job, packs):
    """Those of one data-parallel rank as they would be measured, a loss in chunks with the head in it."""
    forward, inputs, weights = pass_seconds(job, packs)
    tokens = np.array([m.shared_length for m in packs])
    head = job.token.head * tokens * (job.memory.loss_chunks > 1)
    last, passes = len(job.layers) - 1, []
    for stage in range(last + 1):
        for place in range(len(packs)):
            apart = head[place] * (stage == last)
            passes.append(Pass("F", stage, place, 0.0, forward[stage, place] - apart))
            backward = inputs[stage, place] + weights[stage, place] - 2 * apart
            passes.append(Pass("B", stage, place, 0.0, backward))
            if apart:
                passes.append(Pass("L", stage, place, 0.0, 3 * apart))
    return passes


@pytest.mark.parametrize("chunks", [1, 8])
@pytest.mark.parametrize("name", ["pipeline", "interleaved", "context", "tensor", "slices", "shared"])
def test_a_profile_of_passes_predicts_them(name, chunks, tmp_path):
    """Of a machine that is slower at everything by different factors; one pass of twenty is disturbed."""
    job = job_of(name)
    job = replace(job, memory=replace(job.memory, loss_chunks=chunks))
    packs = [plan.of_rank(0) for plan in job.plans(DOCUMENTS, 6)]
    measured = [passes_of(truth(job), step) for step in packs]
    parts = np.concatenate([calibrate.pass_parts(job, *step) for step in zip(packs, measured, strict=True)])
    seconds = np.array([p.seconds for step in measured for p in step])
    disturbed = seconds * np.where(np.random.default_rng(0).random(len(seconds)) < 0.05, 3, 1)
    off = pass_seconds(job, packs[0]) / pass_seconds(truth(job), packs[0])
    assert np.abs(off - 1).max() > 0.3

    path = tmp_path / "profile.json"
    calibrate.calibrated(job, calibrate.fit(parts, disturbed, calibrate.as_predicted(job)), "test").save(path)

    fitted = replace(job, context=replace(job.context, profile=str(path)))
    predicted, took = (pass_seconds(of, packs[0]) for of in (fitted, truth(job)))
    assert predicted[0] == pytest.approx(took[0], rel=0.04)
    assert predicted[1:].sum(axis=0) == pytest.approx(took[1:].sum(axis=0), rel=0.04)
    if name in ("context", "slices"):  # in windows of equal tokens nothing tells constants from the rest
        assert fitted.token.layer == pytest.approx(SLOWER["layer"], rel=0.05)


def test_what_passes_say_nothing_of_stays_as_predicted():
    """Forward passes of equal work alone: they take twice the time, however that is shared out."""
    parts = np.tile([4, 0, 1.0, 2.0, 0, 0.5], (20, 1))
    prior = np.array([0.0, 0.0, 1.0, 1.0, 1.0])
    factors = calibrate.fit(parts, np.full(20, 6.5), prior)
    assert (parts[0] @ [*factors, 1]) == pytest.approx(6.5, rel=0.01)
    assert factors[[1, 4]].tolist() == [0.0, 1.0]
    assert calibrate.fit(parts, np.full(20, 3.5), prior) == pytest.approx(prior, abs=1e-6)


@pytest.mark.parametrize("slow", [None, 2])
def test_a_slow_rank_is_named_with_what_it_takes(slow):
    """Its stage has the same layers as the others, and passes differ by 3 % everywhere."""
    job, random = job_of("pipeline"), np.random.default_rng(1)
    packs = job.plans(DOCUMENTS, 1)[0].of_rank(0)
    passes = passes_of(truth(job), packs)
    named, measured = [f"rank {stage} on host b" for stage in range(4)], []
    for one, parts in zip(passes, calibrate.pass_parts(job, packs, passes).tolist(), strict=True):
        seconds = one.seconds * (1 + 0.03 * random.standard_normal()) * (1.3 if one.stage == slow else 1)
        facts = {calibrate.PARTS: parts, calibrate.RANK: named[one.stage]}
        measured.append(replace(one, seconds=seconds, facts=facts))
    times = 1 if slow is None else 2 * calibrate.JUDGED // len(measured)  # more passes than it fits to
    found = calibrate.slow_ranks(measured * times, calibrate.as_predicted(job))
    assert found == ({} if slow is None else {named[slow]: pytest.approx(1.3, rel=0.05)})


def test_each_layers_constant_makes_fewer_micropacks_worth_it():
    job = job_of("slices")
    job = job.on(replace(job.cluster, linear_flops=1e10, memory_bandwidth=1e10))
    cluster = replace(job.cluster, layer=(3e-3, 6e-3))
    alone, constant = (of.planner(DOCUMENTS).policy.micropacks for of in (job, job.on(cluster)))
    assert constant < alone
