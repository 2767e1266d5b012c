"""Degrees, schedules and policies that fit memory, ranked by predicted FLOPs per second (docs/simulator.md).

Hundreds of candidates are too many to plan. So each first gets a step of N equal micro-batches, an average
window's work shared equally by all ranks: that takes milliseconds, and hardly any policy is faster.
Candidates whose plain micro-batches fit memory are planned, the most promising first, until perfect balance
would be slower than the fastest found and at least `LEAST` of them fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.errors import PlanError
from wlb_titan.job import Job, Policy
from wlb_titan.layers.passes import Loads
from wlb_titan.pipeline.schedule import KNOWN, SCHEDULES
from wlb_titan.progress import Progress, silent
from wlb_titan.simulator.choice import Scenario
from wlb_titan.simulator.step import Prediction, step_seconds

MOST_CHUNKS = 8
MOST_STAGES = 64
LEAST = 8  # candidates that fit, so that a few runners-up are known too
SAMPLE = 4096  # documents whose mean work stands for all


class Search(NamedTuple):
    found: list[Prediction]  # candidates that fit, the fastest first, each with its `job`
    configured: Prediction | None  # the given job, under its fastest policy
    untried: int  # candidates for which there was no time


def search(
    scenario: Scenario,
    gpus: int,
    policies: list[Policy],
    steps: int,
    goes_on: Callable[[str], bool] = lambda what: True,
    report: Progress = silent,
    told: Callable[[Job, list[Policy]], Job] = lambda job, policies: job,
) -> Search:
    """Tries the ways to run a job; `goes_on`, asked with a way's name, says if there is time to plan it, and
    `told` gives it the accounts of its layers."""
    window = _average_window(scenario)
    bounds: list[tuple[float, Job]] = []
    for job in candidates(scenario.job, gpus):
        with suppress(PlanError):
            bounds.append((_if_balanced(job, window), job))
    bounds.sort(key=lambda candidate: -candidate[0])
    predictions: list[Prediction] = []
    fastest, fitting, untried = 0.0, 0, 0
    for number, (bound, job) in enumerate(bounds):
        if bound < fastest and fitting >= LEAST:
            break
        if not goes_on(f"{job.degrees}, {pipeline_words(job)}"):
            untried = len(bounds) - number
            break
        likely = sum(bound >= fastest for bound, _ in bounds)
        report("Trying ways to run the job", number, max(likely, number + LEAST - fitting))
        tried = _tried(scenario.on(told(job, policies)), policies, steps)
        fitting += bool(tried)
        predictions += tried
        fastest = max([fastest, *(prediction.flops_per_second for prediction in tried)])
    if not predictions:
        raise PlanError(
            f"No configuration fits {gpus} GPU{'s' * (gpus > 1)} of {scenario.job.cluster.memory / 1e9:g} GB "
            f"with {scenario.job.micro_batches} micro-batches of {scenario.job.window:,} tokens: none of "
            f"{len(bounds)} ways to run the job, of which {untried} were not tried. Take more GPUs, "
            f"{'' if scenario.job.mixes else 'full activation checkpointing '}or a shorter context window."
        )
    predictions.sort(key=lambda prediction: -prediction.flops_per_second)
    unchanged = _tried(scenario, policies, steps) if scenario.job.degrees.ranks == gpus else []
    configured = max(unchanged, key=lambda prediction: prediction.flops_per_second, default=None)
    return Search(predictions, configured, untried)


def candidates(job: Job, gpus: int) -> Iterator[Job]:
    for degrees in degrees_of(job, gpus):
        for schedule, chunks in _schedules(job, degrees):
            yield at_degrees(job, degrees, schedule, chunks)


def degrees_of(job: Job, gpus: int) -> Iterator[Degrees]:
    """Degrees that multiply to `gpus` and divide the model and the micro-batches; own dimensions stay."""
    own, own_data = job.degrees.own, job.degrees.own_data
    gpus, rest = divmod(gpus, math.prod(dim.degree for dim in own))
    if rest:
        return
    model, powers = job.model, _powers_of_two(gpus)
    for tensor, context, pipeline in itertools.product(powers, powers, powers):
        shard, rest = divmod(gpus, tensor * context * pipeline)
        data = shard * own_data
        if rest or tensor > job.cluster.gpus_per_node or model.heads % tensor or model.kv_heads % tensor:
            continue
        if job.micro_batches % data or job.micro_batches // data < pipeline or pipeline > model.layers:
            continue
        for expert in _powers_of_two(max(model.experts, 1)):
            if tensor * context * shard % expert == 0:
                yield Degrees(
                    tensor=tensor, context=context, pipeline=pipeline, shard=shard, expert=expert, own=own
                )


def at_degrees(job: Job, degrees: Degrees, schedule: str, chunks: int) -> Job:
    """The job at other degrees, with each replica's step in one run."""
    attention = job.attention
    if attention is not None:
        attention = replace(attention, heads=job.model.heads // degrees.tensor)
    return replace(
        job,
        degrees=degrees,
        attention=attention,
        schedule=schedule,
        chunks=chunks,
        per_run=None,
        stage_layers=(),
    )


def _schedules(job: Job, degrees: Degrees) -> Iterator[tuple[str, int]]:
    """Schedules, and stages a rank. Without split backward passes zero bubble is 1F1B."""
    if degrees.pipeline == 1:
        yield "1F1B", 1
        return
    most = min(MOST_CHUNKS, MOST_STAGES // degrees.pipeline, job.model.layers // degrees.pipeline)
    for name in KNOWN:
        schedule = SCHEDULES[name]
        if name == "GPipe" or (schedule.splits and not job.shape.splits):  # GPipe is 1F1B with more memory
            continue
        choices = [schedule.chunks] if schedule.chunks else _powers_of_two(most)[1:]
        yield from ((name, chunks) for chunks in choices if chunks <= max(most, 1))


def _average_window(scenario: Scenario) -> list[float]:
    """Tokens, seconds of attention's forward and backward on one head, the model's FLOPs."""
    job = scenario.job
    lengths = scenario.documents.mixture().sample()[:SAMPLE]
    whole, rest = lengths // job.window, lengths % job.window
    pieces = np.concatenate([np.full(int(whole.sum()), job.window), rest[rest > 0]])
    one_head = replace(job.latency, heads=1)
    everything = [pieces.sum(), *one_head.work(pieces, pieces).sum(axis=1), job.model.flops(pieces)]
    return [float(value * job.window / pieces.sum()) for value in everything]


def _if_balanced(job: Job, window: list[float]) -> float:
    """FLOP/s of equal micro-batches, of which nothing travels, as under `hybrid` nothing may have to."""
    share = job.latency.heads / job.degrees.context
    tokens, forward, backward, flops = (np.full((job.replica_micro_batches, 1), value) for value in window)
    none = np.zeros_like(tokens)
    passing = Loads(tokens, forward * share, backward * share, none, none, none)
    return float(flops.sum() * job.degrees.data / step_seconds(job, passing))


def _tried(scenario: Scenario, policies: list[Policy], steps: int) -> list[Prediction]:
    predictions: list[Prediction] = []
    for policy in policies if scenario.job.fitting.windows_fit else ():
        with suppress(PlanError):
            predictions.append(replace(scenario.predict(policy, steps), plans=()))  # which would fill memory
    return [prediction for prediction in predictions if prediction.fits]


def pipeline_words(job: Job) -> str:
    """Schedule and stages a rank: "Interleaved1F1B x 4"."""
    if job.degrees.pipeline == 1:
        return "no pipeline"
    return job.schedule + (f" x {job.chunks}" if job.chunks > 1 else "")


def _powers_of_two(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length())]
