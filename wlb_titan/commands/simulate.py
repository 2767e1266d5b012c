"""`wlb-titan simulate`: what a job would do on a cluster, without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from wlb_titan.commands.charts import lines, pipeline_charts, stacked
from wlb_titan.commands.console import print_choice, say, show_table, warnings_once
from wlb_titan.commands.job import describe_job, load_job
from wlb_titan.commands.options import (
    OVERRIDABLE,
    check_outputs,
    of_job,
    report_option,
    steps_option,
    writing,
)
from wlb_titan.commands.page import (
    Card,
    Try,
    choice_section,
    command,
    cost,
    described,
    gained,
    search_command,
    section,
    table,
    write_page,
)
from wlb_titan.commands.search import SEARCH_SECONDS, figures, print_search, what_to_know
from wlb_titan.cost.profile import Profile
from wlb_titan.errors import PlanError, UserError
from wlb_titan.job import Job, Policy
from wlb_titan.memory.rank import GIB, TERMS
from wlb_titan.plan import Plan
from wlb_titan.simulator.choice import Scenario, network_sensitivity
from wlb_titan.simulator.step import Prediction
from wlb_titan.simulator.timeline import Step, step_timeline
from wlb_titan.simulator.trace import write_trace
from wlb_titan.summary import Estimate

SLOWER = 2.0  # the network, in the sensitivity column

Rows = list[dict[str, str]]
Plans = dict[Policy, list[Plan]]
Predictions = dict[Policy, Prediction]


@click.command(context_settings=OVERRIDABLE)
@of_job
@click.option(
    "--policies",
    metavar="PACKING[:SHARDING[:ORDER]],...",
    help="Side by side; the first is the baseline.  [default: plain and the file's own]",
)
@steps_option(20, "Steps to simulate.")
@click.option(
    "--offload", type=float, metavar="SHARE", help="Share of saved activations to offload to host memory."
)
@click.option(
    "--tensor-overlap",
    type=float,
    metavar="SHARE",
    help="Share of tensor parallelism's collectives that run behind matrix products.  [default: the TOML "
    "file's, or 0]",
)
@click.option(
    "--routing-imbalance",
    type=float,
    metavar="FACTOR",
    help="Tokens of the busiest expert-parallel rank over the mean.  [default: 1]",
)
@click.option(
    "--attention",
    type=click.Path(path_type=Path),
    metavar="FILE.json",
    help="Times of attention from this profile.  [default: as configured]",
)
@click.option("--no-overlap", is_flag=True, help="Gradients are reduced after the last backward pass.")
@click.option("--search", is_flag=True, help="Try the degrees and schedules of --gpus GPUs, and rank them.")
@click.option(
    "--search-seconds",
    type=click.FloatRange(1, 86400),
    help=f"With --search: rank what was found by then.  [default: {SEARCH_SECONDS:g}]",
)
@report_option
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="Timeline for ui.perfetto.dev."
)
def simulate(
    file: Path,
    overrides: tuple[str, ...],
    policies: str | None,
    steps: int,
    lengths: str | None,
    cluster: str | None,
    gpus: int | None,
    search: bool,
    search_seconds: float | None,
    report: Path | None,
    trace: Path | None,
    **options: Any,
) -> None:
    """Predict step time, tokens/s, MFU and memory of FILE's job on a cluster, for several policies.

    The documents are those of the file's corpus, or of --lengths, which needs none:

    \b
    wlb-titan simulate train_configs/llama2_7b_128k.toml --report outputs/simulated
    wlb-titan simulate train_configs/llama2_7b_128k.toml --lengths web --training.seq_len 65536
    wlb-titan simulate train_configs/llama2_70b_128k.toml --lengths paper --policies plain,wlb:adaptive
    wlb-titan simulate train_configs/llama2_7b_128k.toml --lengths FILE --search --gpus 64

    The speedup of a policy is in FLOPs a second: tokens of documents that are cut are cheaper.

    The bubble is the share of a step in which a rank waits; the last column says what a policy gains over
    the first one if the network between nodes were half as fast. docs/simulator.md explains the model.
    """
    _check_options(search, search_seconds=search_seconds, report=report, trace=trace)
    check_outputs(report=report, trace=trace)
    with warnings_once():
        asked = load_job(file, overrides, lengths=lengths, cluster=cluster, gpus=None if search else gpus)
    compared = [Policy.parse(one) for one in policies.split(",")] if policies else None
    compared = list(dict.fromkeys(compared or [Policy("plain"), asked.job.policy]))
    if search and (fixed := [key for key in asked.overridden if key.endswith("_parallel_degree")]):
        raise PlanError(f"--search tries all degrees of --gpus GPUs; leave out {', '.join(fixed)}.")
    with warnings_once(), asked.placed():
        scenario = Scenario(_told(asked.job, options), asked.documents)
        if search:
            print_search(scenario, asked.resolved, compared, steps, gpus, search_seconds or SEARCH_SECONDS)
            return
        plans, predictions, impossible = _predicted(scenario, compared, steps)
        possible = [policy for policy in compared if policy not in impossible]
        choices = [choice for policy in possible if (choice := scenario.choice(policy))]
        for choice in choices:
            print_choice(choice)
        say(describe_job(scenario.job, scenario.documents))
        rows = table_rows(scenario, plans, predictions, impossible)
        show_table(rows)
        notes = [f"{policy} is not possible here: {error}" for policy, error in impossible.items()]
        notes += what_to_know(predictions)
        say(*notes)
    if trace is None and report is None:
        return
    steps_drawn = _typical_steps(plans, predictions)
    if trace is not None:
        with writing(f"--trace: {trace}"):
            write_trace([span for spans, _ in steps_drawn.values() for span in spans], trace)
        click.echo(f"Timeline: {trace} (open it at https://ui.perfetto.dev)")
    if report is not None:
        sections = [*map(choice_section, choices), section("Policies", " ".join(notes), table(rows))]
        drawn = write_report(report, scenario, plans, predictions, steps_drawn, sections, asked.typed)
        click.echo(f"Report: {drawn}")


def _check_options(search: bool, **given: Any) -> None:
    """Refuses options that would do nothing."""
    for name, value in given.items():
        of_search = name == "search_seconds"
        if value is not None and of_search != search:
            why = "is of a search; add --search" if of_search else "draws policies; leave out --search"
            raise PlanError(f"--{name.replace('_', '-')} {why}.")


def _told(job: Job, options: Mapping[str, Any]) -> Job:
    """The job with what only predictions know and no key says."""
    changes = {
        name: options[name] for name in ("tensor_overlap", "routing_imbalance") if options[name] is not None
    }
    if options["offload"] is not None:
        changes["memory"] = replace(job.memory, offload=options["offload"])
    if options["no_overlap"]:
        changes["overlap"] = False
    if options["attention"] is not None:
        changes["attention"] = Profile.load(options["attention"]).latency(job.attention_shape)
    return replace(job, **changes)


def _predicted(
    scenario: Scenario, policies: Sequence[Policy], steps: int
) -> tuple[Plans, Predictions, dict[Policy, UserError]]:
    """Plans and predictions by policy, and why others are not possible; refused where the job's own policy is
    not, or none is."""
    plans, predictions, impossible = {}, {}, {}
    for policy in policies:
        try:
            decided = scenario.under(policy).policy
            if decided not in predictions:
                planned = scenario.plans(decided, steps)
                plans[decided], predictions[decided] = planned, scenario.simulate(decided, planned)
        except UserError as error:
            if policy == scenario.job.policy:
                raise
            impossible[policy] = error
    if not predictions:
        raise next(iter(impossible.values()))
    return plans, predictions, impossible


def _typical_steps(plans: Plans, predictions: Predictions) -> dict[str, Step]:
    """By policy the step that comes nearest to the mean, which stands for all."""
    steps = {}
    for policy, one in predictions.items():
        number = int(abs(one.seconds - one.seconds.mean()).argmin())
        steps[str(policy)] = step_timeline(one.job, plans[policy][number], str(policy))
    return steps


def table_rows(
    scenario: Scenario, plans: Plans, predictions: Predictions, impossible: Mapping[Policy, UserError]
) -> Rows:
    """A row for each policy, as the console and the page show it; those not possible have no figures."""
    slower = network_sensitivity(scenario, plans, SLOWER)
    first, base = next(iter(predictions.items()))
    rows = [
        {
            "policy": str(policy),
            **figures(one),
            "on rank": f"{one.peak_memory.rank}",
            "speedup": speedup(one, base).text(".3f", "x"),
            "in tokens": f"{one.tokens_per_second / base.tokens_per_second:.3f}x",
            "slow net": f"{slower[policy] / slower[first]:.3f}x",
        }
        for policy, one in predictions.items()
    ]
    return rows + [dict.fromkeys(rows[0], "–") | {"policy": str(policy)} for policy in impossible]


def speedup(prediction: Prediction, baseline: Prediction) -> Estimate:
    """FLOPs a second over the baseline's, which cut documents do not flatter as tokens do."""
    mine, base = (Estimate.rate(one.flops, one.seconds) for one in (prediction, baseline))
    return mine.over(base)


TIME = "Mean of the steps. A GPU computes, or it waits for others."
STEP = "The slowest data-parallel replica. A row is a pipeline rank, a box a pass of one micro-batch."
HELD = "GiB on one GPU of each pipeline rank, at the end of each pass."
PEAK = "By pipeline rank, the largest of all steps; the line is what a GPU has."


def write_report(
    folder: Path,
    scenario: Scenario,
    plans: Plans,
    predictions: Predictions,
    steps: Mapping[str, Step],
    sections: Sequence[str],
    typed: Sequence[str],
) -> Path:
    """Draws what was simulated.

    Args:
        plans, predictions: by policy, the baseline first.
        steps: timeline and memory of a typical step, by policy.
        sections: what was printed.
        typed: what the command line names, as of `page.command`.
    """
    named = {str(policy): prediction for policy, prediction in predictions.items()}
    imbalances = {str(policy): float(np.mean([p.imbalance for p in own])) for policy, own in plans.items()}
    base = next(iter(named))
    gains = {name: speedup(one, named[base]) for name, one in named.items()}
    fitting = [name for name, one in named.items() if one.fits] or list(named)
    best = max(fitting, key=lambda name: gains[name].value)
    degrees = named[best].job.degrees
    waited = imbalances[best] if degrees.pipeline * degrees.data > 1 else None  # by none on one replica
    corpus, about = described(scenario.job, scenario.documents)
    return write_page(
        folder,
        title=f"What balance is worth: {corpus}",
        answer=f"{gained(best, gains[best], base)}; {cost(named[best].bubble, waited)}",
        about=about,
        cards=[
            card(name, one, gains[name], base, f"imbalance {imbalances[name]:.3f}")
            for name, one in named.items()
        ],
        tries=_tries(best, named[best], typed),
        sections=[
            *sections,
            section(
                "Where the time of a step goes",
                TIME,
                stacked("", "seconds", {name: _step_parts(one) for name, one in named.items()}),
            ),
            section("A typical step", STEP, pipeline_charts({name: step[0] for name, step in steps.items()})),
            section("Activations over that step", HELD, *(_held(name, step) for name, step in steps.items())),
            section("Peak memory", PEAK, *(_peak_memory(name, one) for name, one in named.items())),
        ],
    )


def card(name: str, one: Prediction, gain: Estimate, base: str, *more: str) -> Card:
    """What matters most of a prediction: what it gains, `more`, and what it costs."""
    facts = (
        "the baseline" if name == base else f"the FLOPs a second of {base}",
        *more,
        f"bubble {one.bubble:.1%}, MFU {one.mfu:.1%}",
        f"{one.tokens_per_second:,.0f} tokens a second",
        f"{one.peak_memory.total / GIB:.1f} of {one.job.cluster.memory / GIB:.0f} GiB",
    )
    return Card(name, gain.text(".2f", "x"), facts)


def _tries(best: str, prediction: Prediction, typed: Sequence[str]) -> list[Try]:
    why = "Other degrees and schedules of as many GPUs"
    why += f", as a GPU waits for {prediction.bubble:.0%} of the step:" if prediction.bubble >= 0.1 else ":"
    tries = [Try(why, search_command(typed, prediction.job.degrees.ranks))]
    if "--lengths" not in typed:
        dryrun = command("dryrun", typed, "--policy", ":".join(prediction.job.policy))
        tries.append(Try(f"Whether {best} runs, and what it takes, traced on this machine:", dryrun))
    return tries


def _step_parts(one: Prediction) -> dict[str, float]:
    busy, sent = float(one.busy.mean()), float(one.communication.mean())
    waiting = float(one.seconds.mean()) - busy - sent
    return {"busy": busy, "waiting": waiting, "data-parallel communication": sent}


def _held(name: str, step: Step) -> str:
    curves = {f"pp {one.rank}": (one.seconds, one.bytes_ / GIB) for one in step[1]}
    return lines(name, "seconds", curves, zero=True, interpolate="step-after")


def _peak_memory(name: str, one: Prediction) -> str:
    terms = {
        f"pp {rank.rank}": {term.replace("_", " "): getattr(rank, term) / GIB for term in TERMS}
        for rank in one.memory
    }
    return stacked(name, "GiB", terms, limit=one.job.cluster.memory / GIB)
