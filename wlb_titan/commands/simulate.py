"""`wlb-titan simulate`: what a job would do on a cluster, without running it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wlb_titan.commands.console import make_console, print_choice, show_table, warnings_once
from wlb_titan.commands.job import describe_job, lengths_option, load_job, placed
from wlb_titan.commands.plan import COUNT, SEED, STEPS, TOKENS
from wlb_titan.cost.attention_hopper import KERNELS
from wlb_titan.errors import PlanError

if TYPE_CHECKING:
    from wlb_titan.plan import Plan
    from wlb_titan.policies import Policy
    from wlb_titan.simulator.choice import Choice
    from wlb_titan.simulator.scenario import Scenario
    from wlb_titan.simulator.search import Search
    from wlb_titan.simulator.step import Prediction

DEFAULT_POLICIES = "plain:per_sequence,fixed_greedy:per_sequence,wlb:adaptive,wlb_lazy:hybrid:best"
TABLE_WIDTH = 128  # also where no terminal tells its own
SEARCH_WIDTH = 152
SHOWN = 12  # of a search
SECONDS_BETWEEN_LINES = 5.0  # of its progress


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path), metavar="[FILE.toml]")
@lengths_option
@click.option(
    "--model",
    metavar="SIZE-WINDOW",
    default="7B-128K",
    show_default=True,
    help="Without FILE.toml: the row of the paper's Table 1.",
)
@click.option(
    "--cluster",
    metavar="NAME|FILE.toml",
    help="h100_roce, h100_measured, h200, cpu or a file like theirs (docs/simulator.md).  [default: the TOML "
    "file's, or h100_roce]",
)
@click.option(
    "--policies",
    metavar="PACKING[:SHARDING[:ORDER]],...",
    default=DEFAULT_POLICIES,
    help=f"Side by side; the first is the baseline.  [default: {DEFAULT_POLICIES}]",
)
@click.option("--steps", type=STEPS, default=20, show_default=True, help="Steps to simulate.")
@click.option("--context-window", type=TOKENS, help="Tokens of the longest document a model sees.")
@click.option("--micro-batches", type=COUNT, help="N, those of the whole job in one step.")
@click.option("--tensor-parallel", type=COUNT, help="Degree, instead of the configured one.")
@click.option("--context-parallel", type=COUNT, help="Degree.")
@click.option("--pipeline-parallel", type=COUNT, help="Degree.")
@click.option("--data-parallel", type=COUNT, help="Degree.")
@click.option("--expert-parallel", type=COUNT, help="Degree; borrows ranks of the others.")
@click.option("--gpus", type=COUNT, help="What the degrees must multiply to.")
@click.option(
    "--schedule",
    metavar="NAME",
    help="GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble or ZBVZeroBubble.",
)
@click.option("--chunks", type=COUNT, help="Stages of each pipeline rank.")
@click.option("--checkpointing", type=click.Choice(("none", "selective", "full")), help="Of activations.")
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
@click.option("--max-length", type=TOKENS, help="wlb, wlb_lazy: L_max in tokens.")
@click.option("--no-overlap", is_flag=True, help="Gradients are reduced after the last backward pass.")
@click.option("--seed", type=SEED, help="Shuffle every epoch by this seed.")
@click.option("--search", is_flag=True, help="Try the degrees and schedules of --gpus GPUs, and rank them.")
@click.option(
    "--search-seconds",
    type=click.FloatRange(1, 86400),
    default=300.0,
    show_default=True,
    help="With --search: rank what was found by then.",
)
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="With --search: write its winner as a file that extends the given one.",
)
@click.option("--report", type=click.Path(path_type=Path), metavar="DIR", help="Draw DIR/report.html.")
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="Timeline for ui.perfetto.dev."
)
def simulate(
    config: Path | None,
    policies: str,
    steps: int,
    search: bool,
    search_seconds: float,
    write: Path | None,
    report: Path | None,
    trace: Path | None,
    **options: Any,
) -> None:
    """Predict step time, tokens/s, MFU and memory of a job on a cluster, for several policies.

    Either from a training configuration and its corpus (FILE.toml), or from document lengths, or both:

    \b
    wlb-titan simulate train_configs/llama2_7b_128k.toml --report outputs/simulated
    wlb-titan simulate train_configs/llama2_7b_128k.toml --lengths web
    wlb-titan simulate --lengths paper --model 70B-128K --policies plain,wlb:adaptive
    wlb-titan simulate --lengths FILE --model 7B-128K --search --gpus 64

    The bubble is the share of a step in which a rank waits; the last column says what a policy gains over
    the first one if the network between nodes were half as fast. docs/simulator.md explains the model.
    """
    from wlb_titan.policies import Policy
    from wlb_titan.simulator.scenario import Scenario

    asked = list(dict.fromkeys(Policy.parse(text) for text in policies.split(",")))
    given = {name: value for name, value in options.items() if value is not None}
    fixed = [f"--{name.replace('_', '-')}" for name in given if name.endswith("_parallel")]
    if search and fixed:
        raise PlanError(f"--search tries all degrees of --gpus GPUs; leave out {', '.join(fixed)}.")
    if write is not None:
        from wlb_titan.commands.simulate_toml import check_writable

        if not search:
            raise PlanError("--write writes what --search found; add --search.")
        check_writable(write, config, [name for name, value in given.items() if value is not False])
    with warnings_once(), placed(config, given):
        scenario = Scenario(*load_job(config, {**given, "search": search}, lambda row: row))
        choices = [] if search else [choice for policy in asked if (choice := scenario.choice(policy))]
        for choice in choices:
            print_choice(choice)
        if search:
            result = _print_search(scenario, asked, steps, given.get("gpus"), search_seconds)
        else:
            decided = dict.fromkeys(scenario.under(policy).policy for policy in asked)
            plans = {policy: scenario.plans(policy, steps) for policy in decided}
            predictions = {policy: scenario.simulate(policy, planned) for policy, planned in plans.items()}
            _print(scenario, plans, predictions)
    if not search:
        _export(scenario, plans, predictions, choices, report, trace)
    elif write is not None and config is not None:
        from wlb_titan.commands.simulate_toml import write_winner

        write_winner(write, config, result)
        click.echo(f"Written: {write}; `wlb-titan config check {write}`")


def _print(
    scenario: Scenario, plans: dict[Policy, list[Plan]], predictions: dict[Policy, Prediction]
) -> None:
    from wlb_titan.commands.simulate_rows import remarks, table_rows

    console = make_console(TABLE_WIDTH)
    console.print(describe_job(scenario.job, scenario.documents), markup=False, soft_wrap=True)
    show_table(console, table_rows(scenario, plans, predictions))
    for line in remarks(predictions):
        console.print(line, markup=False, soft_wrap=True)


def _print_search(
    scenario: Scenario, policies: list[Policy], steps: int, gpus: int | None, seconds: float
) -> Search:
    from wlb_titan.commands.simulate_rows import gain, remarks, search_rows
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
    console = make_console(SEARCH_WIDTH)
    console.print(describe_job(scenario.job, scenario.documents), markup=False, soft_wrap=True)
    show_table(console, search_rows(result)[:SHOWN])
    console.print(
        f"{len(result.found)} candidates were planned and fit; {result.slower} would be slower than the best "
        f"even if they were perfectly balanced, {result.too_large} need more memory and {result.refused} are "
        "not possible.",
        soft_wrap=True,
    )
    if result.untried:
        console.print(
            f"{result.untried} were not tried in the {seconds:.0f} s of --search-seconds.", soft_wrap=True
        )
    console.print(gain(result), markup=False, soft_wrap=True)
    for line in remarks({found.policy: found.prediction for found in result.found[:1]}):
        console.print(line, markup=False, soft_wrap=True)
    return result


def _export(
    scenario: Scenario,
    plans: dict[Policy, list[Plan]],
    predictions: dict[Policy, Prediction],
    choices: list[Choice],
    report: Path | None,
    trace: Path | None,
) -> None:
    from wlb_titan.errors import PlanError
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
        try:
            write_trace([span for spans, _ in steps.values() for span in spans], trace)
        except OSError as error:
            raise PlanError(f"The timeline cannot be written to {trace}: {error.strerror}.") from error
        click.echo(f"Timeline: {trace} (open it at https://ui.perfetto.dev)")
    if report is not None:
        from wlb_titan.commands.simulate_report import write_report

        click.echo(f"Report: {write_report(report, scenario, plans, predictions, steps, choices)}")
