"""`wlb-titan plan`: plan the packing of documents without model, training or GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wlb_titan.commands.console import make_console, show_table, warnings_once
from wlb_titan.settings import MOST_TOKENS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wlb_titan.commands.plan_job import Job
    from wlb_titan.plan import Plan
    from wlb_titan.planner import Planner
    from wlb_titan.summary import Summary

POLICIES = ("plain", "fixed_greedy", "fixed_solver", "wlb", "wlb_lazy")
TABLE_WIDTH = 96  # also where no terminal tells its own
FEW_STEPS = 100  # fewer carry their standard error
SHARDINGS = ("per_sequence", "per_document", "adaptive", "hybrid")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
ORDERS = ("as_packed", "longest_first", "shortest_first", "best")


TOKENS = click.IntRange(2, MOST_TOKENS)
COUNT = click.IntRange(1, 1 << 20)
STEPS = click.IntRange(1, 1 << 20)
SEED = click.IntRange(0, 2**63 - 1)


class Thresholds(click.ParamType):
    """`auto`, or lengths in tokens with commas between them."""

    name = "auto|L1,L2,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "auto" or isinstance(value, list):
            return value
        try:
            return [int(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is neither 'auto' nor whole numbers with commas between them.", param, ctx)


def packing_options(command: Any) -> Any:
    """The settings of [wlb.packing] as options; one not given keeps the TOML file's value, or the default."""
    options = [
        click.option("--tail", type=click.Choice(("carry", "drop")), help="plain: a cut document's rest."),
        click.option(
            "--window", type=int, help="fixed_*: global batches that are packed together.  [default: 1]"
        ),
        click.option("--time-limit", type=float, help="fixed_solver: seconds a window.  [default: 10]"),
        click.option("--gap", type=float, help="fixed_solver: relative gap to stop at.  [default: 0.001]"),
        click.option(
            "--max-length", type=int, help="wlb, wlb_lazy: L_max in tokens.  [default: 2 context windows]"
        ),
        click.option("--thresholds", type=Thresholds(), help="wlb: lengths that open a queue."),
        click.option("--queues", type=int, help="wlb: number of queues with automatic thresholds."),
        click.option("--tolerance", type=float, help="wlb_lazy: imbalance worth one iteration of delay."),
        click.option("--max-delay", type=int, help="wlb_lazy: iterations after which a document must go."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path), metavar="[FILE.toml]")
@click.option(
    "--lengths",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Plan over this text file, one document's length in tokens a line, instead of a corpus.",
)
@click.option("--policy", type=click.Choice(POLICIES), help="Packing policy.  [default: plain]")
@click.option("--compare", metavar="POLICY,...", help="Several policies on the same stream, side by side.")
@click.option("--context-window", type=TOKENS, help="Tokens of the longest document a model sees.")
@click.option("--micro-batches", type=COUNT, help="N, those of the whole job in one step.")
@click.option("--data-parallel", type=COUNT, help="Degree.  [default: 1]")
@click.option("--context-parallel", type=COUNT, help="Degree; above 1 each micro-batch is sharded.")
@click.option("--sharding", type=click.Choice(SHARDINGS), help="Sharding policy.  [default: per_sequence]")
@click.option("--pipeline-parallel", type=COUNT, help="Degree.  [default: 1]")
@click.option("--schedule", type=click.Choice(SCHEDULES), help="Of the pipeline.  [default: 1F1B]")
@click.option("--order", type=click.Choice(ORDERS), help="Of its micro-batches.  [default: as_packed]")
@click.option("--steps", type=STEPS, default=100, show_default=True, help="Steps to plan.")
@click.option(
    "--cost-model", metavar="MODEL", help="analytic, quadratic:A,B or a profile's path.  [default: analytic]"
)
@click.option(
    "--model",
    metavar="SIZE-WINDOW",
    default="7B-128K",
    show_default=True,
    help="With --lengths: the row of the paper's Table 1 for which the analytic cost model stands.",
)
@click.option(
    "--seed",
    type=SEED,
    help="Shuffle every epoch by this seed.  [default: FILE's own order; the TOML's seed]",
)
@packing_options
@click.option("--output", type=click.Path(path_type=Path), help="Write the plans, one JSON object a line.")
@click.option("--report", type=click.Path(path_type=Path), metavar="DIR", help="Draw DIR/report.html.")
def plan(
    config: Path | None,
    lengths: Path | None,
    compare: str | None,
    steps: int,
    output: Path | None,
    report: Path | None,
    **options: Any,
) -> None:
    """Plan the packing of documents without training, and print how balanced it is.

    Either from a training configuration and its corpus (FILE.toml), or from a file of lengths:

    \b
    wlb-titan plan train.toml --compare plain,wlb,wlb_lazy --report outputs/plan
    wlb-titan plan --lengths FILE --policy wlb --context-window 131072 --micro-batches 4 \\
        --cost-model quadratic:0.9e6,4e10 --output plan.jsonl

    The imbalance of a step is the largest over the mean work of its micro-batches; a delay is the number of
    iterations between a document's arrival and its training, averaged over tokens.
    """
    from wlb_titan.commands.plan_job import job_from_lengths, job_from_toml
    from wlb_titan.errors import PlanError

    if (config is None) == (lengths is None):
        raise PlanError("Name either a TOML file or, with --lengths, a file of document lengths.")
    given = {name: value for name, value in options.items() if value is not None}
    policies = _policies(compare, given.get("policy"))
    if output is not None and policies is not None and len(policies) > 1:
        raise PlanError("--output writes the plans of one policy; leave out --compare, or --output.")
    with warnings_once():
        job = job_from_toml(config, given) if config else job_from_lengths(lengths, given)
        policies = policies or [job.packing.policy]
        summaries = {policy: _run(job, policy, steps, output) for policy in policies}
        if report is not None and "plain" not in summaries:  # what the balance would be without
            summaries = {"plain": _run(job, "plain", steps, None), **summaries}
    _print(job, summaries)
    times = None
    if job.context_parallel > 1:
        from wlb_titan.commands.rank_report import planned_rank_times, rank_table

        times = planned_rank_times(job, policies[-1], steps)
        make_console(TABLE_WIDTH).print(rank_table(times, job.latency))
    if report is not None:
        from wlb_titan.commands.plan_report import write_report

        click.echo(f"Report: {write_report(report, job, summaries, times)}")


def _policies(compare: str | None, policy: str | None) -> list[str] | None:
    from wlb_titan.errors import PlanError

    if compare is None:
        return None if policy is None else [policy]
    names = list(dict.fromkeys(name.strip() for name in compare.split(",")))
    for name in names:
        if name not in POLICIES:
            raise PlanError(
                f"--compare: there is no packing policy {name!r}; there are {', '.join(POLICIES)}."
            )
    return names


def _run(job: Job, policy: str, steps: int, output: Path | None) -> Summary:
    from rich.console import Console
    from rich.progress import track

    from wlb_titan.errors import PlanError
    from wlb_titan.summary import Summary

    console = Console(stderr=True)
    if console.is_terminal:
        numbers = track(range(steps), description=f"{policy:12}", console=console, transient=True)
    else:
        numbers = range(steps)
    planner = job.planner(policy)
    if output is None:
        return Summary.of(planner.next() for _ in numbers)
    try:
        with output.open("w", encoding="utf-8") as file:
            return Summary.of(_written(planner, numbers, file))
    except OSError as error:
        raise PlanError(f"The plans cannot be written to {output}: {error.strerror}.") from error


def _written(planner: Planner, numbers: Any, file: Any) -> Iterator[Plan]:
    for _ in numbers:
        plan = planner.next()
        file.write(json.dumps(plan.to_json()) + "\n")
        yield plan


def _print(job: Job, summaries: dict[str, Summary]) -> None:
    console = make_console(TABLE_WIDTH)
    console.print(job.describe(), markup=False, soft_wrap=True)
    show_table(console, [{"policy": name, **table_row(s)} for name, s in summaries.items()])
    for name, summary in summaries.items():
        if summary.lost:
            console.print(f"{name}: {summary.lost:,} tokens were left out.", markup=False)
        if summary.gap is not None:
            proven = "all optimal" if summary.gap == 0 else f"at most {summary.gap:.1%} from the optimum"
            console.print(f"{name}: the solver's packings are {proven}.", markup=False)


def plus_minus(values: NDArray[np.float64]) -> str:
    """The standard error of a mean, where it is of few steps and would show: ` ±0.012`."""
    if not 1 < len(values) < FEW_STEPS:
        return ""
    return f" ±{values.std(ddof=1) / len(values) ** 0.5:.3f}"


def table_row(summary: Summary) -> dict[str, str]:
    """Headings and cells of one policy, as the console and the report show them."""
    figures = summary.figures()
    return {
        "imbalance": f"{figures['imbalance_mean']:.3f}" + plus_minus(summary.imbalance),
        "p95": f"{figures['imbalance_p95']:.3f}",
        "max": f"{figures['imbalance_max']:.3f}",
        "delay": f"{figures['delay_mean']:.2f}",
        "max delay": f"{figures['delay_max']}",
        "padding": f"{figures['padding']:.2%}",
        "plan ms": f"{figures['plan_ms']:.1f}",
        "longest": f"{figures['longest']:,}",
    }
