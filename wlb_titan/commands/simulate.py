"""`wlb-titan simulate`: what a job would do on a cluster, without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from wlb_titan.commands.command_line import (
    MANY,
    OVERRIDABLE,
    Asked,
    Output,
    Rows,
    describe_job,
    load_job,
    of_job,
    print_choice,
    report_option,
    say,
    show_table,
    warnings_once,
    writing,
)
from wlb_titan.commands.page import (
    choice_section,
    command,
    cost,
    described,
    gained,
    lines,
    pipeline_charts,
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

Plans = dict[Policy, list[Plan]]
Predictions = dict[Policy, Prediction]


@click.command(context_settings=OVERRIDABLE)
@of_job
@click.option(
    "--policies",
    metavar="PACKING[:SHARDING[:ORDER]],...",
    help="Side by side; the first is the baseline.  [default: plain and the file's own]",
)
@click.option("--steps", type=MANY, default=20, help="Steps to simulate.")
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
@click.option("--trace", type=Output(), metavar="FILE", help="Timeline for ui.perfetto.dev.")
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
    drawn = _typical_steps(plans, predictions)
    if trace is not None:
        with writing(f"--trace: {trace}"):
            write_trace([span for spans, _ in drawn.values() for span in spans], trace)
        click.echo(f"Timeline: {trace} (open it at https://ui.perfetto.dev)")
    if report is not None:
        sections = [*map(choice_section, choices), section("Policies", " ".join(notes), table(rows))]
        sections += _pictures(predictions, drawn)
        page = write_report(report, asked, plans, predictions, rows[: len(predictions)], sections)
        click.echo(f"Report: {page}")


def _check_options(search: bool, **given: Any) -> None:
    """Refuses options that would do nothing."""
    for name, value in given.items():
        of_search = name == "search_seconds"
        if value is not None and of_search != search:
            why = "is of a search; add --search" if of_search else "draws policies; leave out --search"
            raise PlanError(f"--{name.replace('_', '-')} {why}.")


def _told(job: Job, options: Mapping[str, Any]) -> Job:
    """The job with what only predictions need and no key sets."""
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
    """Plans and predictions by policy, and why others are impossible; raises if the job's own is, or all."""
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


def table_rows(
    scenario: Scenario, plans: Plans, predictions: Predictions, impossible: Mapping[Policy, UserError]
) -> Rows:
    """A row for each policy, for the console and the page; impossible ones have no figures."""
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


STEP = "The slowest data-parallel replica. A row is a pipeline rank, a box a pass of one micro-batch."
HELD = "GiB on one GPU of each pipeline rank, at the end of each pass."
PEAK = "GiB of the fullest GPU by what they are for."


def _typical_steps(plans: Plans, predictions: Predictions) -> dict[str, Step]:
    """For each policy, the step nearest to the mean."""
    steps = {}
    for policy, one in predictions.items():
        number = int(abs(one.seconds - one.seconds.mean()).argmin())
        steps[str(policy)] = step_timeline(one.job, plans[policy][number], str(policy))
    return steps


def _pictures(predictions: Predictions, steps: Mapping[str, Step]) -> list[str]:
    held = {
        name: {f"pp {one.rank}": (one.seconds, one.bytes_ / GIB) for one in curves}
        for name, (_, curves) in steps.items()
    }
    curves = (lines(name, "seconds", own, zero=True, interpolate="step-after") for name, own in held.items())
    peaks = {str(policy): one.peak_memory for policy, one in predictions.items()}
    terms = [term for term in TERMS if any(getattr(peak, term) for peak in peaks.values())]
    memory = [
        {"policy": name}
        | {term: f"{getattr(peak, term) / GIB:.1f}" for term in terms}
        | {"all": f"{peak.total / GIB:.1f}"}
        for name, peak in peaks.items()
    ]
    return [
        section("A typical step", STEP, pipeline_charts({name: spans for name, (spans, _) in steps.items()})),
        section("Activations over that step", HELD, *curves),
        section("Peak memory", PEAK, table(memory)),
    ]


def write_report(
    folder: Path, asked: Asked, plans: Plans, predictions: Predictions, cards: Rows, sections: Sequence[str]
) -> Path:
    """The baseline is the first of the policies."""
    named = {str(policy): prediction for policy, prediction in predictions.items()}
    base = next(iter(named))
    gains = {name: speedup(one, named[base]) for name, one in named.items()}
    fitting = [name for name, one in named.items() if one.fits] or list(named)
    best = max(fitting, key=lambda name: gains[name].value)
    prediction = named[best]
    degrees, policy = prediction.job.degrees, prediction.job.policy
    waited = None  # by nobody on one replica
    if degrees.pipeline * degrees.data > 1:
        waited = float(np.mean([plan.imbalance for plan in plans[policy]]))
    why = "Other degrees and schedules of as many GPUs"
    why += f", as a GPU waits for {prediction.bubble:.0%} of the step:" if prediction.bubble >= 0.1 else ":"
    tries = [(why, search_command(asked.typed, degrees.ranks))]
    if asked.lengths is None:
        dryrun = command("dryrun", asked.typed, "--policy", ":".join(policy))
        tries.append((f"Whether {best} runs, and what it takes, traced on this machine:", dryrun))
    corpus, about = described(asked.job, asked.documents)
    return write_page(
        folder,
        title=f"What balance is worth: {corpus}",
        answer=f"{gained(best, gains[best], base)}; {cost(prediction.bubble, waited)}",
        about=about,
        cards=cards,
        figure="speedup",
        facts=("bubble", "MFU", "tokens/s", "peak GiB"),
        tries=tries,
        sections=sections,
    )
