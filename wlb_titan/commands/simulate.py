"""`wlb-titan simulate`: what a job would do on a cluster, without running it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wlb_titan.commands.console import print_choice, say, show_table, warnings_once
from wlb_titan.commands.errors import writing
from wlb_titan.commands.job import Asked, describe_job, load_job
from wlb_titan.commands.options import OVERRIDABLE, of_job, report_option, steps_option
from wlb_titan.cost.attention_choice import named_attention
from wlb_titan.cost.attention_hopper import KERNELS
from wlb_titan.errors import PlanError

if TYPE_CHECKING:
    from wlb_titan.job import Job
    from wlb_titan.plan import Plan
    from wlb_titan.policies import Policy
    from wlb_titan.simulator.choice import Choice
    from wlb_titan.simulator.scenario import Scenario
    from wlb_titan.simulator.search import Search
    from wlb_titan.simulator.step import Prediction

DEFAULT_POLICIES = "plain:per_sequence,fixed_greedy:per_sequence,wlb:adaptive,wlb_lazy:hybrid:best"
SHOWN = 12  # of a search
SECONDS_BETWEEN_LINES = 5.0  # of its progress


@click.command(context_settings=OVERRIDABLE)
@of_job
@click.option(
    "--policies",
    metavar="PACKING[:SHARDING[:ORDER]],...",
    help=f"Side by side; the first is the baseline.  [default: {DEFAULT_POLICIES}; plain and the policy that "
    "is chosen after --, if one is]",
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
    metavar="NAME|FILE.json",
    help=f"Times of attention: {', '.join(KERNELS)}, or a profile.  [default: as configured]",
)
@click.option("--no-overlap", is_flag=True, help="Gradients are reduced after the last backward pass.")
@click.option("--search", is_flag=True, help="Try the degrees and schedules of --gpus GPUs, and rank them.")
@click.option(
    "--search-seconds",
    type=click.FloatRange(1, 86400),
    default=300.0,
    help="With --search: rank what was found by then.",
)
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    metavar="FILE.toml|megatron",
    help="With --search: write its winner as a file that extends the given one, or has torchtitan's base of "
    "config.json's sizes; `megatron` prints it as arguments of Megatron-LM.",
)
@report_option
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="Timeline for ui.perfetto.dev."
)
def simulate(
    words: tuple[str, ...],
    policies: str | None,
    steps: int,
    gpus: int | None,
    search: bool,
    search_seconds: float,
    write: Path | None,
    report: Path | None,
    trace: Path | None,
    lengths: str | None,
    model: str,
    cluster: str | None,
    **options: Any,
) -> None:
    """Predict step time, tokens/s, MFU and memory of a job on a cluster, for several policies.

    Either from a training configuration and its corpus (FILE.toml), or from document lengths, or both. Any
    key of the configuration can be given after --, as in training:

    \b
    wlb-titan simulate train_configs/llama2_7b_128k.toml --report outputs/simulated
    wlb-titan simulate train_configs/llama2_7b_128k.toml --lengths web -- --training.seq_len 65536
    wlb-titan simulate --lengths paper --model 70B-128K --policies plain,wlb:adaptive
    wlb-titan simulate --lengths FILE --model 7B-128K --search --gpus 64

    The speedup of a policy is in FLOPs a second: tokens of documents that are cut are cheaper.

    The bubble is the share of a step in which a rank waits; the last column says what a policy gains over
    the first one if the network between nodes were half as fast. docs/simulator.md explains the model.
    """
    from wlb_titan.commands.megatron import megatron_arguments
    from wlb_titan.commands.report.page import typed
    from wlb_titan.commands.report.simulate import remarks, table_rows
    from wlb_titan.commands.simulate_toml import MEGATRON, check_writable, write_winner
    from wlb_titan.simulator.scenario import Scenario

    if write is not None and not search:
        raise PlanError("--write writes what --search found; add --search.")
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    with warnings_once():
        job = load_job(words, lengths=lengths, model=model, cluster=cluster, gpus=None if search else gpus)
    compared = _policies(policies, job)
    if search and (fixed := [key for key in job.changes if key.endswith("_parallel_degree")]):
        raise PlanError(f"--search tries all degrees of --gpus GPUs; leave out {', '.join(fixed)}.")
    if write is not None:
        check_writable(write, job, list(given))
    with warnings_once(), job.placed():
        scenario = Scenario(_told(job.job, given), job.documents)
        choices = [] if search else [choice for policy in compared if (choice := scenario.choice(policy))]
        for choice in choices:
            print_choice(choice)
        if search:
            result = _print_search(scenario, compared, steps, gpus, search_seconds)
        else:
            decided = dict.fromkeys(scenario.under(policy).policy for policy in compared)
            plans = {policy: scenario.plans(policy, steps) for policy in decided}
            predictions = {policy: scenario.simulate(policy, planned) for policy, planned in plans.items()}
            say(describe_job(scenario.job, scenario.documents))
            show_table(table_rows(scenario, plans, predictions))
            say(*remarks(predictions))
    if not search:
        _export(scenario, plans, predictions, choices, report, trace, typed(words, lengths, model))
    elif write is not None and write.name == MEGATRON:
        click.echo(megatron_arguments(result.found[0].job))
    elif write is not None:
        write_winner(write, job, result)
        click.echo(f"Written: {write}; `wlb-titan config check {write}`")


def _policies(text: str | None, asked: Asked) -> list[Policy]:
    """The policies to compare: as given, or the usual ones, or the one that an override chooses."""
    from wlb_titan.policies import Policy

    if text is None and "wlb.packing.policy" in asked.changes:
        return list(dict.fromkeys([Policy("plain"), asked.job.policy]))
    return list(dict.fromkeys(Policy.parse(one) for one in (text or DEFAULT_POLICIES).split(",")))


def _told(job: Job, given: Mapping[str, Any]) -> Job:
    """The job with what only predictions know and no key says."""
    changes = {name: given[name] for name in ("tensor_overlap", "routing_imbalance") if name in given}
    if "offload" in given:
        changes["memory"] = replace(job.memory, offload=given["offload"])
    if "no_overlap" in given:
        changes["overlap"] = False
    if "attention" in given:
        changes["attention"] = named_attention(given["attention"], job.attention_shape)
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
    choices: list[Choice],
    report: Path | None,
    trace: Path | None,
    what: str,
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

        click.echo(f"Report: {write_report(report, scenario, plans, predictions, steps, choices, what)}")
