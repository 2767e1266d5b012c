"""`wlb-titan simulate`: what a job would do on a cluster, without running it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wlb_titan.commands.console import print_choice, say, show_table, warnings_once
from wlb_titan.commands.errors import check_outputs, writing
from wlb_titan.commands.job import describe_job, load_job
from wlb_titan.commands.options import OVERRIDABLE, of_job, report_option, steps_option
from wlb_titan.cost.profile import Profile
from wlb_titan.errors import PlanError, UserError

if TYPE_CHECKING:
    from wlb_titan.job import Job
    from wlb_titan.plan import Plan
    from wlb_titan.policies import Policy
    from wlb_titan.simulator.choice import Choice
    from wlb_titan.simulator.scenario import Scenario
    from wlb_titan.simulator.search import Search
    from wlb_titan.simulator.step import Prediction

SEARCH_SECONDS = 300.0
SHOWN = 12  # of a search
SECONDS_BETWEEN_LINES = 5.0  # of its progress


@click.command(context_settings=OVERRIDABLE)
@of_job
@click.option(
    "--policies",
    metavar="PACKING[:SHARDING[:ORDER]],...",
    help="Side by side; the first is the baseline.  [default: plain and the file's own]",
)
@steps_option(20, "Steps to simulate.")
@click.option("--offload", type=float, metavar="SHARE", help="Of kept activations, to the host's memory.")
@click.option(
    "--tensor-overlap",
    type=float,
    metavar="SHARE",
    help="Of tensor parallelism's collectives, behind matrix products.  [default: the TOML file's, or 0]",
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
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    metavar="BEST.toml",
    help="With --search: write its winner as a file that extends the given one.",
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
    write: Path | None,
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
    from wlb_titan.commands.report.simulate import remarks, table_rows
    from wlb_titan.commands.simulate_toml import check_writable, write_winner
    from wlb_titan.policies import Policy
    from wlb_titan.simulator.scenario import Scenario

    _check_options(search, write=write, search_seconds=search_seconds, report=report, trace=trace)
    check_outputs(write=write, report=report, trace=trace)
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    with warnings_once():
        asked = load_job(file, overrides, lengths=lengths, cluster=cluster, gpus=None if search else gpus)
    compared = [Policy.parse(one) for one in policies.split(",")] if policies else None
    compared = list(dict.fromkeys(compared or [Policy("plain"), asked.job.policy]))
    if search and (fixed := [key for key in asked.changes if key.endswith("_parallel_degree")]):
        raise PlanError(f"--search tries all degrees of --gpus GPUs; leave out {', '.join(fixed)}.")
    if write is not None:
        check_writable(write, list(given))
    with warnings_once(), asked.placed():
        scenario = Scenario(_told(asked.job, given), asked.documents)
        if search:
            result = _print_search(scenario, compared, steps, gpus, search_seconds or SEARCH_SECONDS)
        else:
            plans, predictions, impossible = _predicted(scenario, compared, steps)
            possible = [policy for policy in compared if policy not in impossible]
            choices = [choice for policy in possible if (choice := scenario.choice(policy))]
            for choice in choices:
                print_choice(choice)
            say(describe_job(scenario.job, scenario.documents))
            show_table(table_rows(scenario, plans, predictions, impossible))
            say(*remarks(predictions, impossible))
    if not search:
        _export(scenario, plans, predictions, impossible, choices, report, trace, asked.typed)
    elif write is not None:
        write_winner(write, asked, result)
        click.echo(f"Written: {write}; `wlb-titan config check {write}`")


def _check_options(search: bool, **given: Any) -> None:
    """Refuses options that would do nothing."""
    for name, value in given.items():
        of_search = name in ("write", "search_seconds")
        if value is not None and of_search != search:
            why = "is of a search; add --search" if of_search else "draws policies; leave out --search"
            raise PlanError(f"--{name.replace('_', '-')} {why}.")


def _predicted(
    scenario: Scenario, policies: Sequence[Policy], steps: int
) -> tuple[dict[Policy, list[Plan]], dict[Policy, Prediction], dict[Policy, UserError]]:
    """Plans and predictions by policy, and why others are not possible.

    Raises:
        UserError: the job's own policy is not, or none is.
    """
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


def _told(job: Job, given: Mapping[str, Any]) -> Job:
    """The job with what only predictions know and no key says."""
    changes = {name: given[name] for name in ("tensor_overlap", "routing_imbalance") if name in given}
    if "offload" in given:
        changes["memory"] = replace(job.memory, offload=given["offload"])
    if "no_overlap" in given:
        changes["overlap"] = False
    if "attention" in given:
        changes["attention"] = Profile.load(given["attention"]).latency(job.attention_shape)
    return replace(job, **changes)


def _print_search(
    scenario: Scenario, policies: list[Policy], steps: int, gpus: int | None, seconds: float
) -> Search:
    from wlb_titan.commands.report.simulate import gain, remarks, search_rows
    from wlb_titan.simulator.search import search

    begin = told = time.monotonic()

    def goes_on(what: str) -> bool:
        nonlocal told
        now = time.monotonic()
        if now - told > SECONDS_BETWEEN_LINES:
            told = now
            click.echo(f"Trying {what} ({now - begin:.0f} s of {seconds:.0f}) ...", err=True)
        return now - begin < seconds

    result = search(scenario, gpus or scenario.job.degrees.ranks, policies, steps, goes_on)
    say(describe_job(scenario.job, scenario.documents))
    show_table(search_rows(result)[:SHOWN])
    say(
        f"{len(result.found)} candidates were planned and fit; {result.slower} would be slower than the best "
        f"even if they were perfectly balanced, {result.too_large} need more memory and {result.refused} are "
        "not possible."
    )
    if result.untried:
        say(f"{result.untried} were not tried in the {seconds:.0f} s of --search-seconds.")
    best = result.found[0]
    say(gain(result), *remarks({best.job.policy: best}))
    return result


def _export(
    scenario: Scenario,
    plans: dict[Policy, list[Plan]],
    predictions: dict[Policy, Prediction],
    impossible: dict[Policy, UserError],
    choices: list[Choice],
    report: Path | None,
    trace: Path | None,
    typed: Sequence[str],
) -> None:
    from wlb_titan.simulator.timeline import step_timeline
    from wlb_titan.timeline import write_trace

    if trace is None and report is None:
        return
    # The step that comes nearest to the mean stands for all.
    steps = {}
    for policy, prediction in predictions.items():
        typical = int(abs(prediction.seconds - prediction.seconds.mean()).argmin())
        steps[policy] = step_timeline(predictions[policy].job, plans[policy][typical], str(policy))
    if trace is not None:
        with writing(f"--trace: {trace}"):
            write_trace([span for spans, _ in steps.values() for span in spans], trace)
        click.echo(f"Timeline: {trace} (open it at https://ui.perfetto.dev)")
    if report is not None:
        from wlb_titan.commands.report.simulate import write_report

        drawn = write_report(report, scenario, plans, predictions, impossible, steps, choices, typed)
        click.echo(f"Report: {drawn}")
