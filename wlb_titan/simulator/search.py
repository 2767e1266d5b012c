"""Degrees of parallelism and policies that fit memory, ranked by predicted tokens per second.

Degrees of tensor and context parallelism are powers of two, tensor parallelism within a node and a divisor of
the heads; pipelines have at most a rank for every layer; what is left is data parallelism. A candidate whose
plain micro-batches do not fit memory is left out before it is planned. Balanced packing gets the longest
micro-batches that fit, up to two context windows, which is the default of `max_length` everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from wlb_titan.cost.degrees import Degrees
from wlb_titan.errors import PlanError
from wlb_titan.job import Job, Policy
from wlb_titan.simulator.scenario import Scenario
from wlb_titan.simulator.step import Prediction


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate that fits.

    Attributes:
        degrees: of parallelism.
        policy: of packing, sharding and order.
        prediction: of its steps.
        max_length: tokens that a micro-batch may have.
    """

    degrees: Degrees
    policy: Policy
    prediction: Prediction
    max_length: int


@dataclass(frozen=True, slots=True)
class Search:
    """What a search came to.

    Attributes:
        found: candidates that fit, the fastest first.
        too_large: degrees of which not even plain micro-batches fit memory.
        refused: degrees that the schedule or the window does not allow.
        untried: degrees for which there was no time.
    """

    found: list[Found]
    too_large: int
    refused: int
    untried: int = 0


def search(
    scenario: Scenario,
    gpus: int,
    policies: list[Policy],
    steps: int,
    goes_on: Callable[[str], bool] = lambda what: True,
) -> Search:
    """Tries all degrees that multiply to `gpus` with all policies.

    Args:
        scenario: documents and job.
        gpus: how many.
        policies: of packing, sharding and order.
        steps: to simulate of each.
        goes_on: asked before each trial, which it is told, whether there is time for it.

    Raises:
        PlanError: nothing fits.
    """
    found: list[Found] = []
    too_large = refused = untried = 0
    for degrees in candidates(scenario.job, gpus):
        if untried or not goes_on(str(degrees)):
            untried += 1
            continue
        try:
            job = at_degrees(scenario.job, degrees)
            if job.longest_that_fits is None:
                too_large += 1
                continue
            for policy in policies:
                if not goes_on(f"{degrees} {policy}"):
                    untried = 1
                    break
                prediction = scenario.on(job).predict(policy, steps)
                if prediction.fits:
                    longest = prediction.job.longest_micro_batch
                    found.append(Found(degrees, policy, prediction, longest))
        except PlanError:
            refused += 1
    if not found:
        raise PlanError(
            f"Nothing fits {gpus} GPUs of {scenario.job.cluster.memory / 1e9:g} GB: {too_large} ways to "
            f"divide the job need more memory, {untried} were not tried and {refused} are not possible with "
            f"{scenario.job.micro_batches} micro-batches of {scenario.job.window:,} tokens under "
            f"{scenario.job.schedule}. Take more GPUs, full activation checkpointing or a shorter context "
            "window."
        )
    found.sort(key=lambda candidate: -candidate.prediction.tokens_per_second)
    return Search(found, too_large, refused, untried)


def candidates(job: Job, gpus: int) -> Iterator[Degrees]:
    """Degrees that multiply to `gpus` and divide the model and the micro-batches."""
    micro_batches = job.micro_batches
    for tensor in _powers_of_two(min(gpus, job.cluster.gpus_per_node)):
        if job.model.heads % tensor or job.model.kv_heads % tensor:
            continue
        for context in _powers_of_two(gpus // tensor):
            for pipeline in _powers_of_two(gpus // (tensor * context)):
                shard, rest = divmod(gpus, tensor * context * pipeline)
                runs = not rest and micro_batches % shard == 0 and micro_batches // shard >= pipeline
                if runs and pipeline * job.chunks <= job.model.layers:
                    yield Degrees(tensor=tensor, context=context, pipeline=pipeline, shard=shard)


def at_degrees(job: Job, degrees: Degrees) -> Job:
    """The job with other degrees, its attention divided accordingly and each replica's step in one run.

    Raises:
        PlanError: they do not divide the model or the micro-batches, or its strategy cannot share the heads.
    """
    attention = job.attention
    if attention is not None:
        attention = replace(attention, heads=job.model.heads // degrees.tensor)
    return replace(job, degrees=degrees, attention=attention, run=None, stage_layers=())


def _powers_of_two(most: int) -> Iterator[int]:
    degree = 1
    while degree <= most:
        yield degree
        degree *= 2
