"""`wlb-titan simulate`: what a job would do on a cluster, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wlb_titan.commands.console import make_console, make_table, print_choice, warnings_once
from wlb_titan.commands.job import describe_job, load_job

if TYPE_CHECKING:
    from wlb_titan.job import Policy
    from wlb_titan.plan import Plan
    from wlb_titan.simulator.choice import Choice
    from wlb_titan.simulator.scenario import Scenario
    from wlb_titan.simulator.step import Prediction

DEFAULT_POLICIES = "plain:per_sequence,fixed_greedy:per_sequence,wlb:adaptive,wlb_lazy:hybrid:best"
TABLE_WIDTH = 128  # also where no terminal tells its own
SHOWN = 12  # of a search


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path), metavar="[FILE.toml]")
@click.option(
    "--lengths",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Simulate on this text file, one document's length in tokens a line, instead of a corpus.",
)
@click.option(
    "--model",
    metavar="SIZE-WINDOW",
    default="7B-128K",
    show_default=True,
    help="With --lengths: the row of the paper's Table 1.",
)
@click.option(
    "--cluster",
    metavar="NAME|FILE.toml",
    help="h100_roce, h200, cpu or a file like theirs (docs/simulator.md).  [default: the TOML file's, or "
    "h100_roce]",
)
@click.option(
    "--policies",
    metavar="PACKING[:SHARDING[:ORDER]],...",
    default=DEFAULT_POLICIES,
    help=f"Side by side; the first is the baseline.  [default: {DEFAULT_POLICIES}]",
)
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Steps to simulate.")
@click.option("--context-window", type=int, help="Tokens of the longest document a model sees.")
@click.option("--micro-batches", type=int, help="N, those of the whole job in one step.")
@click.option("--tensor-parallel", type=int, help="Degree, instead of the configured one.")
@click.option("--context-parallel", type=int, help="Degree.")
@click.option("--pipeline-parallel", type=int, help="Degree.")
@click.option("--data-parallel", type=int, help="Degree.")
@click.option("--gpus", type=click.IntRange(min=1), help="What the degrees must multiply to.")
@click.option(
    "--schedule",
    metavar="NAME",
    help="GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble or ZBVZeroBubble.",
)
@click.option("--chunks", type=click.IntRange(min=1), help="Stages of each pipeline rank.")
@click.option("--checkpointing", type=click.Choice(("none", "selective", "full")), help="Of activations.")
@click.option("--max-length", type=int, help="wlb, wlb_lazy: L_max in tokens.")
@click.option("--no-overlap", is_flag=True, help="Gradients are reduced after the last backward pass.")
@click.option("--seed", type=int, help="Shuffle every epoch by this seed.")
@click.option("--search", is_flag=True, help="Try all degrees of --gpus GPUs that fit memory, and rank them.")
@click.option("--report", type=click.Path(path_type=Path), metavar="DIR", help="Draw DIR/report.html.")
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="Timeline for ui.perfetto.dev."
)
def simulate(
    config: Path | None,
    lengths: Path | None,
    policies: str,
    steps: int,
    search: bool,
    report: Path | None,
    trace: Path | None,
    **options: Any,
) -> None:
    """Predict step time, tokens/s, MFU and memory of a job on a cluster, for several policies.

    Either from a training configuration and its corpus (FILE.toml), or from a file of lengths:

    \b
    wlb-titan simulate train_configs/llama2_7b_128k.toml --report outputs/simulated
    wlb-titan simulate --lengths FILE --model 70B-128K --policies plain,wlb:adaptive
    wlb-titan simulate --lengths FILE --model 7B-128K --search --gpus 64

    The bubble is the share of a step in which a rank waits; the last column says what a policy gains over
    the first one if the network between nodes were half as fast. docs/simulator.md explains the model.
    """
    from wlb_titan.job import Policy
    from wlb_titan.simulator.scenario import Scenario

    asked = list(dict.fromkeys(Policy.parse(text) for text in policies.split(",")))
    given = {name: value for name, value in options.items() if value is not None}
    with warnings_once():
        scenario = Scenario(*load_job(config, lengths, {**given, "search": search}, lambda row: row))
        choices = [] if search else [choice for policy in asked if (choice := scenario.choice(policy))]
        for choice in choices:
            print_choice(choice)
        if search:
            _print_search(scenario, asked, steps, given.get("gpus"))
        else:
            decided = dict.fromkeys(scenario.under(policy).policy for policy in asked)
            plans = {policy: scenario.plans(policy, steps) for policy in decided}
            predictions = {policy: scenario.simulate(policy, planned) for policy, planned in plans.items()}
            _print(scenario, plans, predictions)
    if not search:
        _export(scenario, plans, predictions, choices, report, trace)


def _print(
    scenario: Scenario, plans: dict[Policy, list[Plan]], predictions: dict[Policy, Prediction]
) -> None:
    from wlb_titan.commands.simulate_rows import remarks, table_rows

    console = make_console(TABLE_WIDTH)
    console.print(describe_job(scenario.job, scenario.documents), markup=False, soft_wrap=True)
    console.print(make_table(table_rows(scenario, plans, predictions)))
    for line in remarks(predictions):
        console.print(line, markup=False, soft_wrap=True)


def _print_search(scenario: Scenario, policies: list[Policy], steps: int, gpus: int | None) -> None:
    from wlb_titan.commands.simulate_rows import remarks, search_rows
    from wlb_titan.simulator.search import search

    result = search(scenario, gpus or scenario.job.degrees.ranks, policies, steps)
    console = make_console(TABLE_WIDTH)
    console.print(describe_job(scenario.job, scenario.documents), markup=False, soft_wrap=True)
    console.print(make_table(search_rows(result)[:SHOWN]))
    console.print(
        f"{len(result.found)} candidates fit; {result.too_large} ways to divide the job need more memory and "
        f"{result.refused} are not possible.",
        soft_wrap=True,
    )
    for line in remarks({found.policy: found.prediction for found in result.found[:1]}):
        console.print(line, markup=False, soft_wrap=True)


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
            write_trace([piece for slices, _ in steps.values() for piece in slices], trace)
        except OSError as error:
            raise PlanError(f"The timeline cannot be written to {trace}: {error.strerror}.") from error
        click.echo(f"Timeline: {trace} (open it at https://ui.perfetto.dev)")
    if report is not None:
        from wlb_titan.commands.simulate_report import write_report

        click.echo(f"Report: {write_report(report, scenario, plans, predictions, steps, choices)}")
