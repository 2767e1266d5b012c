"""`wlb-titan simulate --search`: degrees, schedules and policies, ranked; the keys of the fastest."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from typing import Any

import click

from wlb_titan.commands.command_line import Rows, describe_job, say, show_table
from wlb_titan.config.build import dotted
from wlb_titan.config.load import Resolved
from wlb_titan.config.values import to_text
from wlb_titan.job import Job, Policy
from wlb_titan.memory.rank import GIB
from wlb_titan.simulator.choice import Scenario
from wlb_titan.simulator.search import Search, pipeline_words, search
from wlb_titan.simulator.step import Prediction

SEARCH_SECONDS = 300.0
SHOWN = 12  # candidates
SECONDS_BETWEEN_LINES = 5.0  # of its progress


def print_search(
    scenario: Scenario,
    resolved: Resolved,
    policies: list[Policy],
    steps: int,
    gpus: int | None,
    seconds: float,
) -> None:
    """Searches degrees of `gpus` GPUs (None: as many as the job's own), and prints what came of it."""
    start = told = time.monotonic()

    def goes_on(what: str) -> bool:
        nonlocal told
        now = time.monotonic()
        if now - told > SECONDS_BETWEEN_LINES:
            told = now
            click.echo(f"Trying {what} ({now - start:.0f} s of {seconds:.0f}) ...", err=True)
        return now - start < seconds

    result = search(scenario, gpus or scenario.job.degrees.ranks, policies, steps, goes_on)
    say(describe_job(scenario.job, scenario.documents))
    show_table(search_rows(result)[:SHOWN])
    say(
        f"{len(result.found)} candidates were planned and fit. The others do not, are not possible, or would "
        "be slower than the best even if they were perfectly balanced."
    )
    if result.untried:
        say(f"{result.untried} were not tried in the {seconds:.0f} s of --search-seconds.")
    best = result.found[0]
    say(gain(result))
    if words := winner_words(best.job, resolved):
        say(f"To run it: {shlex.join(words)}")
    say(*what_to_know({best.job.policy: best}))


def search_rows(result: Search) -> Rows:
    """A row for each candidate, the fastest first."""
    best = result.found[0].flops_per_second
    return [
        {
            "degrees": str(found.job.degrees),
            "schedule": pipeline_words(found.job),
            "policy": str(found.job.policy),
            "L_max": f"{found.job.longest_micro_batch:,}",
            **figures(found),
            "of best": f"{found.flops_per_second / best:.1%}",
        }
        for found in result.found
    ]


def figures(one: Prediction) -> dict[str, str]:
    """Headings and cells that every table of predictions has."""
    return {
        "step, s": f"{one.seconds.mean():.3f}",
        "tokens/s": f"{one.tokens_per_second:,.0f}",
        "MFU": f"{one.mfu:.1%}",
        "bubble": f"{one.bubble:.1%}",
        "peak GiB": f"{one.peak_memory.total / GIB:.1f}" + ("" if one.fits else " !"),
    }


def what_to_know(predictions: Mapping[Policy, Prediction]) -> list[str]:
    """What a table does not say: what does not fit or is extrapolated."""
    said = []
    for policy, prediction in predictions.items():
        if not prediction.fits:
            room = prediction.job.fitting.room
            said.append(f"{policy} does not fit {room}: {prediction.peak_memory.explain()}")
    if all(prediction.job.degrees.ranks == 1 for prediction in predictions.values()):
        said.append(
            "One GPU waits for no other, so balance saves it no time: what a balanced policy gains is whole "
            "documents, in which a token attends to more. Compare the speedup or MFU, not tokens/s."
        )
    return said + [p.extrapolated for p in predictions.values() if p.extrapolated][:1]


def gain(result: Search) -> str:
    """A sentence on what the best gains over the configured job."""
    best, own = result.found[0], result.configured
    if own is None:
        return "The configured degrees are of other GPUs or do not fit, so there is no gain to name."
    words = [f"{one.job.degrees}, {pipeline_words(one.job)}, {one.job.policy}" for one in (best, own)]
    return (
        f"The best ({words[0]}) does {best.flops_per_second / own.flops_per_second:.2f}x the FLOPs and "
        f"{best.tokens_per_second / own.tokens_per_second:.2f}x the tokens a second of the configured job at "
        f"its best ({words[1]})."
    )


def winner_words(job: Job, resolved: Resolved) -> list[str]:
    """Overrides that turn a configuration of the same model and window into this job."""
    degrees, policy = job.degrees, job.policy
    wanted: dict[str, Any] = {
        "wlb.packing.policy": policy.packing,
        "wlb.sharding.policy": policy.sharding,
        "wlb.pipeline.order": policy.order,
        "training.local_batch_size": job.replica_micro_batches,
        "training.global_batch_size": job.micro_batches,
        "parallelism.tensor_parallel_degree": degrees.tensor,
        "parallelism.context_parallel_degree": degrees.context,
        "parallelism.pipeline_parallel_degree": degrees.pipeline,
        "parallelism.data_parallel_shard_degree": degrees.shard,
        "parallelism.data_parallel_replicate_degree": degrees.replicate,
        "parallelism.expert_parallel_degree": degrees.expert,
    }
    if degrees.pipeline > 1:
        from wlb_titan.runtime.pipeline.schedules import keys_of_stages

        wanted["parallelism.pipeline_parallel_schedule"] = job.schedule
        stages = keys_of_stages(job.model.layers, job.shape.stages)
        wanted |= {f"parallelism.{key}": value for key, value in stages.items()}
    configured = {dotted(entry.path): entry.value for entry in resolved.entries}
    words = []
    for key, value in wanted.items():
        if value != configured.get(key):
            text = "none" if value is None else value if isinstance(value, str) else to_text(value)
            words += [f"--{key}", text]
    return words
