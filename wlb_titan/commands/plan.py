"""`wlb-titan plan`: plan the packing of documents without model, training or GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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
from wlb_titan.commands.page import choice_section, command, described, lines, section, table, write_page
from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.attention_latency import slowest
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.job import Job
from wlb_titan.packing.predicted import attention_seconds, travelling
from wlb_titan.plan import LENGTH, MicroBatch, Plan, imbalance_degree
from wlb_titan.planner import Planner
from wlb_titan.simulator.choice import Choice, Scenario
from wlb_titan.summary import Estimate, Summary

FEW_STEPS = 100  # fewer carry their standard error in the table
STEPS_SHOWN = 60  # of the workloads; more become a blur
NEAR = 0.01  # imbalances this close count as the same
SHARDED = 200  # micro-batches under which sharding policies are compared


@click.command(context_settings=OVERRIDABLE)
@of_job
@click.option("--compare", metavar="POLICY,...", help="Packing policies on the same stream, side by side.")
@click.option("--steps", type=MANY, default=100, help="Steps to plan.")
@click.option("--output", type=Output(), help="Write the plans, one JSON object a line.")
@report_option
def plan(
    file: Path,
    overrides: tuple[str, ...],
    compare: str | None,
    steps: int,
    output: Path | None,
    report: Path | None,
    **options: Any,
) -> None:
    """Plan the packing of FILE's job without training, and print how balanced it is.

    The documents are those of the file's corpus, or of --lengths, which needs none:

    \b
    wlb-titan plan train.toml --compare plain,wlb,wlb_lazy --report outputs/plan
    wlb-titan plan train_configs/llama2_7b_128k.toml --lengths FILE --output plan.jsonl \\
        --wlb.packing.policy wlb --wlb.packing.cost_model quadratic:0.9e6,4e10

    The imbalance of a step is the largest over the mean work of its micro-batches; a delay is the number of
    iterations between a document's arrival and its training, averaged over tokens.
    """
    with warnings_once():
        asked = load_job(file, overrides, **options)
    documents = asked.documents
    with warnings_once(), asked.placed():
        scenario = Scenario(asked.job, documents)
        names = compare.split(",") if compare else [asked.job.packing.name]
        policies = dict.fromkeys(asked.job.policy._replace(packing=name.strip()) for name in names)
        choices = [choice for policy in policies if (choice := scenario.choice(policy))]
        for choice in choices:
            print_choice(choice)
        jobs = [scenario.under(policy) for policy in policies]
        if output is not None and len(jobs) > 1:
            raise PlanError("--output writes the plans of one policy; leave out --compare, or --output.")
        summaries = {one.packing.name: _run(one, documents, steps, output) for one in jobs}
        if report is not None and "plain" not in summaries:  # what the balance would be without
            plain = replace(jobs[0], packing=jobs[0].packing.named("plain"))
            summaries = {"plain": _run(plain, documents, steps, None), **summaries}
    job = jobs[-1]
    say(describe_job(job, documents))
    show_table(table_rows(summaries))
    say(*remarks(summaries))
    sharded: Rows = []
    if job.strategy is not None:
        sharded = sharding_rows(sharded_micro_batches(job, documents, steps), job)
        say(f"Context parallelism: attention of a layer by {job.latency.source}")
        show_table(sharded)
    if report is not None:
        click.echo(f"Report: {write_report(report, replace(asked, job=job), summaries, sharded, choices)}")


def _run(job: Job, documents: Documents, steps: int, output: Path | None) -> Summary:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    numbers: Any = range(steps)
    if console.is_terminal:
        numbers = track(numbers, description=f"{job.packing.name:12}", console=console, transient=True)
    planner = job.planner(documents)
    if output is None:
        return Summary.of((planner.next(sharded=()) for _ in numbers), job.window)
    with writing(f"--output: {output}"), output.open("w", encoding="utf-8") as file:
        return Summary.of(_written(planner, numbers, file), job.window)


def _written(planner: Planner, numbers: Any, file: Any) -> Iterator[Plan]:
    for _ in numbers:
        plan = planner.next()
        file.write(json.dumps(plan.to_json()) + "\n")
        yield plan


def table_rows(summaries: Mapping[str, Summary]) -> Rows:
    """A row for each policy, for the console and the page."""
    rows = []
    for name, summary in summaries.items():
        figures, imbalance = summary.figures(), Estimate.mean(summary.imbalance)
        if len(summary.imbalance) >= FEW_STEPS:
            imbalance = Estimate(imbalance.value)
        rows.append(
            {
                "policy": name,
                "imbalance": imbalance.text(".3f"),
                "p95": f"{figures['imbalance_p95']:.3f}",
                "max": f"{figures['imbalance_max']:.3f}",
                "delay": f"{figures['delay_mean']:.2f}",
                "max delay": f"{figures['delay_max']}",
                "padding": f"{figures['padding']:.2%}",
                "cut": f"{figures['cut_share']:.1%}",
                "keys/token": f"{figures['keys_per_token']:,.0f}",
                "plan ms": f"{figures['plan_ms']:.1f}",
                "longest": f"{figures['longest']:,}",
            }
        )
    return rows


def remarks(summaries: Mapping[str, Summary]) -> Iterator[str]:
    """What was left out, and how good a solver's packings are."""
    for name, summary in summaries.items():
        if summary.lost:
            yield f"{name}: {summary.lost:,} tokens were left out."
        if summary.gap is not None:
            proven = "all optimal" if summary.gap == 0 else f"at most {summary.gap:.1%} from the optimum"
            yield f"{name}: the solver's packings are {proven}."


def sharded_micro_batches(job: Job, documents: Documents, steps: int) -> list[MicroBatch]:
    """The first `SHARDED` micro-batches of these steps, without those that data-parallel ranks share."""
    plans = job.plans(documents, min(steps, -(-SHARDED // job.micro_batches)))
    return [m for plan in plans for m in plan.micro_batches if not m.merged][:SHARDED]


def sharding_rows(micro_batches: Sequence[MicroBatch], job: Job) -> Rows:
    """A row for each sharding policy that the job's heads and lengths allow: the slowest rank's attention, a
    layer's collectives, none hidden, what a rank receives in a step, and how often a sharding was chosen."""
    passes = max(job.layers) * job.chunks * job.replica_micro_batches  # of layers on a rank in a step
    rows: Rows = []
    first = 0.0
    for policy in STRATEGIES.candidates:
        try:
            under = replace(job, sharding=job.sharding.named(policy))
            packs = [_sharded(m, under) for m in micro_batches]
        except PlanError:
            continue
        ranks = [attention_seconds(m, under) for m in packs]  # float64 (ranks, 2), forward and backward
        exchange, received = np.mean(
            [under.exchanging.in_all_passes(travelling(m, under)) for m in packs], axis=0
        )
        attention = float(np.mean([slowest(seconds) for seconds in ranks]))
        first = first or attention + exchange
        imbalances = np.array([imbalance_degree(seconds.sum(axis=1)) for seconds in ranks])
        chosen = [str(m.sharding) for m in packs]
        shares = {name: chosen.count(name) / len(chosen) for name in dict.fromkeys(chosen)}
        rows.append(
            {
                "sharding": policy,
                "slowest rank": f"{attention * 1e3:.3f} ms",
                "exchange": f"{exchange * 1e3:.3f} ms",
                "received": f"{received * passes / 1e9:.2f} GB",
                "speedup": f"{first / (attention + exchange):.3f}x",
                "imbalance": f"{imbalances.mean():.3f}",
                "p95": f"{np.quantile(imbalances, 0.95):.3f}",
                "max": f"{imbalances.max():.3f}",
                "chosen": ", ".join(f"{name} {share:.0%}" for name, share in shares.items()),
            }
        )
    return rows


def _sharded(micro_batch: MicroBatch, job: Job) -> MicroBatch:
    assert job.strategy is not None
    lengths = micro_batch.documents[:, LENGTH]
    name, ranks = job.strategy.shard(lengths, micro_batch.length, slices=micro_batch.elsewhere)
    return replace(micro_batch, sharding=name, ranks=tuple(ranks))


WORK = "Dots: the work of a step's micro-batches. The gap between the mean and the largest is waiting."
IMBALANCE = "Largest over mean work of a step's micro-batches, of all steps in rising order; 1 is perfect."
DELAY = "What balance costs: documents that wait for a step that can bear them."


def write_report(
    folder: Path, asked: Asked, summaries: Mapping[str, Summary], sharded: Rows, choices: Sequence[Choice]
) -> Path:
    """The first of the `summaries` is the baseline; `choices` is what `auto` stands for."""
    job, rows = asked.job, table_rows(summaries)
    means = {name: float(one.imbalance.mean()) for name, one in summaries.items()}
    waits = {name: f"{1 - 1 / mean:.1%}" for name, mean in means.items()}
    near = [name for name, mean in means.items() if mean <= min(means.values()) + NEAR]
    best, first = min(near, key=lambda name: summaries[name].delay), next(iter(summaries))
    answer = f"Under {best} GPUs wait {waits[best]} of the time for the largest micro-batch"
    if best != first:
        answer += f", under {first} {waits[first]}; for it a token waits {summaries[best].delay:.2f} steps"
    rising = {n: (np.linspace(0, 100, len(s.imbalance)), np.sort(s.imbalance)) for n, s in summaries.items()}
    corpus, about = described(job, asked.documents)
    return write_page(
        folder,
        title=f"How {corpus} packs",
        answer=f"{answer}.",
        about=about,
        cards=rows,
        figure="imbalance",
        facts=("cut", "delay", "keys/token"),
        tries=[
            ("What that is worth in time and memory:", command("simulate", asked.typed)),
            ("To train so, in the TOML file:", f'[wlb.packing]\npolicy = "{best}"'),
        ],
        sections=[
            *map(choice_section, choices),
            section("Work of every micro-batch", WORK, *_workloads(summaries)),
            section("Imbalance", IMBALANCE, lines("", "% of steps", rising)),
            section("Delay", DELAY, *_delay(summaries, job.micro_batches * job.window)),
            section("All figures", "", table(rows)),
            section("Context parallelism", "Attention of a layer, predicted.", table(sharded)),
        ],
    )


def _workloads(summaries: Mapping[str, Summary]) -> Iterator[str]:
    """Every micro-batch's work, step by step: a chart for each policy, on one scale."""
    mean = np.mean([summary.workloads.mean() for summary in summaries.values()])
    works = {name: summary.workloads[:STEPS_SHOWN] / mean for name, summary in summaries.items()}
    top = max(float(work.max()) for work in works.values())
    for name, work in works.items():
        steps = np.arange(len(work))
        curves = {"mean": (steps, work.mean(axis=1)), "largest": (steps, work.max(axis=1))}
        dots = {"micro-batches": (steps.repeat(work.shape[1]), work.ravel())}
        yield lines(name, "step", curves, dots=dots, zero=True, top=top)


def _delay(summaries: Mapping[str, Summary], batch_tokens: int) -> list[str]:
    """What waits after each step, a moving average over many steps; and how long tokens waited."""
    span = max(len(next(iter(summaries.values())).waiting) // 20, 1)
    smooth = {
        name: np.convolve(one.waiting / batch_tokens, np.full(span, 1 / span), "valid")
        for name, one in summaries.items()
    }
    waiting = {name: (np.arange(len(one)) + (span - 1) / 2, one) for name, one in smooth.items()}
    later = {
        n: (range(len(s.delays)), 100 * (1 - np.cumsum(s.delays) / s.tokens)) for n, s in summaries.items()
    }
    title = "tokens that wait, in steps' worth" + (f", mean of {span}" if span > 1 else "")
    return [
        lines(title, "step", waiting, zero=True),
        lines("tokens that waited longer, %", "steps", later, zero=True, interpolate="step-after"),
    ]
