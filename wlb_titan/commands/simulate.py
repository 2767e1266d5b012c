"""`wlb-titan simulate`: what a job would do on a cluster, without running it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from wlb_titan.commands import command_line as cli
from wlb_titan.commands import page
from wlb_titan.commands.search import SEARCH_SECONDS, print_search
from wlb_titan.commands.simulate_page import best_of, timed, write_report
from wlb_titan.context.all_gather import AllGather
from wlb_titan.errors import PlanError, UserError
from wlb_titan.job import Policy
from wlb_titan.layers.groups import grouped
from wlb_titan.runs import write_trace
from wlb_titan.simulator.choice import Scenario
from wlb_titan.simulator.step import Prediction
from wlb_titan.simulator.step import simulate as predict
from wlb_titan.summary import Estimate

Predictions = dict[Policy, Prediction]


@click.command(cls=cli.OfFile)
@cli.of_job
@cli.policies_option("plain, the file's")
@click.option("--steps", type=cli.MANY, default=20, help="Steps to simulate.")
@click.option(
    "--search",
    is_flag=True,
    help=f"Search degrees and schedules for --world-size GPUs for up to {SEARCH_SECONDS:g} s and rank them.",
)
@click.option(
    "--write",
    type=cli.Output(),
    metavar="FILE.toml",
    help="Write the best that --search finds as a file that extends FILE.",
)
@cli.report_option
@click.option(
    "--trace",
    type=cli.Output('{"displayTimeUnit": '),
    metavar="FILE",
    help="Write a timeline for ui.perfetto.dev.",
)
def simulate(
    file: Path,
    overrides: tuple[str, ...],
    policies: list[Policy] | None,
    steps: int,
    lengths: str | None,
    cluster: str | None,
    world_size: int | None,
    search: bool,
    write: Path | None,
    report: Path | None,
    trace: Path | None,
) -> None:
    """Predict step time, tokens/s, MFU and memory of FILE's job on a cluster, for several policies.

    The documents are those of the file's corpus, or of --lengths, which needs none:

    \b
    wlb-titan simulate train_configs/llama2_7b_128k.toml --report outputs/simulated
    wlb-titan simulate train_configs/llama2_7b_128k.toml --lengths web --training.seq_len 65536
    wlb-titan simulate train_configs/llama2_70b_128k.toml --lengths paper --policies plain,wlb/adaptive
    wlb-titan simulate train_configs/llama2_7b_128k.toml --search --world-size 64 --write best.toml

    The speedup of a policy is in FLOP/s, because tokens of cut documents are cheaper.

    The bubble is the share of a step in which a rank waits. docs/simulator.md explains the model. The exit
    status is 1 if the file's own policy does not fit or, where it is not compared, if no policy fits.
    """
    if search and (report or trace):
        raise PlanError("--report and --trace draw policies; leave out --search.")
    if write and not search:
        raise PlanError("--write writes the best of a search; add --search.")
    degrees_fit = None if search else world_size
    asked = cli.load_job(file, overrides, lengths=lengths, cluster=cluster, world_size=degrees_fit)
    compared = list(dict.fromkeys(policies or [Policy(), asked.job.policy]))
    with asked.placed():
        asked = replace(asked, job=asked.loaded.told(asked.job, compared))
        if search:
            print_search(asked, compared, steps, world_size or asked.job.degrees.ranks, write)
            return
        with cli.progress() as tell:
            scenario = Scenario(asked.job, asked.documents, tell)
            predictions, impossible = _predicted(scenario, compared, steps)
        possible = [policy for policy in compared if policy not in impossible]
        choices = [choice for policy in possible if (choice := scenario.choice(policy))]
        for choice in choices:
            cli.print_choice(choice)
        cli.say(cli.describe_job(scenario.job, scenario.documents))
        rows = table_rows(predictions, impossible)
        cli.show_table(rows)
        notes = [f"{policy} is not possible here: {error}" for policy, error in impossible.items()]
        best = best_of(predictions)
        notes += what_to_know(predictions) + in_groups(best, predictions[best])
        cli.say(page.in_parts(best, predictions[best].parts()), *notes)
    drawn = trace is not None or report is not None
    timelines = {policy: timed(policy, each) for policy, each in predictions.items()} if drawn else {}
    if trace is not None:
        with cli.writing(f"--trace: {trace}"):
            write_trace([one for step in timelines.values() for one in step.passes], trace)
        click.echo(f"Timeline: {trace} (open it at https://ui.perfetto.dev)")
    if report is not None:
        last = [
            *map(page.choice_section, choices),
            page.section("Policies", " ".join(notes), page.table(rows)),
        ]
        gain = speedup(predictions[best], next(iter(predictions.values())))
        written = write_report(report, asked, timelines, predictions[best].job, gain, last)
        click.echo(f"Report: {written}")
    configured = predictions.get(scenario.under(scenario.job.policy).policy)
    if not any(prediction.fits for prediction in ([configured] if configured else predictions.values())):
        sys.exit(1)


def _predicted(
    scenario: Scenario, policies: Sequence[Policy], steps: int
) -> tuple[Predictions, dict[Policy, UserError]]:
    """Predictions by policy, and why others are impossible; raises if the job's own is, or all."""
    predictions, impossible = {}, {}
    for policy in policies:
        try:
            decided = scenario.under(policy).policy
            if decided not in predictions:
                predictions[decided] = scenario.predict(decided, steps)
        except UserError as error:
            if policy == scenario.job.policy:
                raise
            impossible[policy] = error
    if not predictions:
        raise next(iter(impossible.values()))
    return predictions, impossible


def table_rows(predictions: Predictions, impossible: Mapping[Policy, UserError]) -> cli.Rows:
    """A row for each policy, for the console and the page; impossible ones have no figures."""
    base = next(iter(predictions.values()))
    rows = [
        {
            "policy": str(policy),
            **prediction.figures(),
            "on rank": f"{prediction.peak_memory.rank}",
            "speedup": speedup(prediction, base).text(".3f", "x"),
            "in tokens": f"{prediction.tokens_per_second / base.tokens_per_second:.3f}x",
        }
        for policy, prediction in predictions.items()
    ]
    return rows + [dict.fromkeys(rows[0], "–") | {"policy": str(policy)} for policy in impossible]


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
    job = next(iter(predictions.values())).job
    if any(job.float8):
        key = "linear_flops" + "_float8" * (job.cluster.linear_flops_float8 > 0)
        rate = job.measured_cluster.product_flops(1.0) / 1e12
        said.append(f"Products in float8 have {key} = {rate:,.0f} TFLOP/s, of {job.cluster.name}.")
    sources = dict.fromkeys(prediction.job.latency.source for prediction in predictions.values())
    said += [f"Times of attention: {source}." for source in sources]
    return said + [p.extrapolated for p in predictions.values() if p.extrapolated][:1]


def in_groups(policy: Policy, prediction: Prediction) -> list[str]:
    """What keys behind attention would gain on the same plans, where that is above 2 %."""
    job = prediction.job
    context = job.context
    if job.strategy is None or not isinstance(context, AllGather.Config) or context.groups == "auto":
        return []
    auto = replace(job, context=replace(context, groups="auto"))
    own = [replace(p, micro_batches=tuple(grouped(auto, p.micro_batches))) for p in prediction.plans]
    gain = speedup(predict(auto, own), prediction)
    said = f"With --wlb.context.groups auto {policy} is predicted {gain.text('.3f')} times as fast"
    return [f"{said}, as keys of some heads travel while others attend."] * (gain.value > 1.02)


def speedup(prediction: Prediction, baseline: Prediction) -> Estimate:
    """FLOPs a second over the baseline's, which cut documents do not flatter as tokens do."""
    rate, base = (Estimate.rate(compared.flops, compared.seconds) for compared in (prediction, baseline))
    return rate.over(base)
