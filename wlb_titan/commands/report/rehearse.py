"""`wlb-titan rehearse` about ranks and steps put together: rows and sentences, and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from wlb_titan.commands.charts import PASSES, pipeline_charts
from wlb_titan.commands.console import make_console, say
from wlb_titan.commands.page import Try, cost, described, gained, search_command, section, table, write_page
from wlb_titan.commands.simulate import card, speedup
from wlb_titan.documents import Documents
from wlb_titan.job import Job
from wlb_titan.plan import Plan
from wlb_titan.simulator.measured import MeasuredPasses
from wlb_titan.simulator.step import Prediction
from wlb_titan.simulator.timeline import step_timeline
from wlb_titan.simulator.trace import Span
from wlb_titan.summary import Estimate


@dataclass(frozen=True)
class Rehearsal:
    """What came of one policy.

    Attributes:
        policy: as it was asked for.
        job, documents, plans: what ran.
        ranks: results of the processes, also of those that failed.
        ran: what they came to; None where no rank came through.
    """

    policy: str
    job: Job
    documents: Documents
    plans: list[Plan]
    ranks: list[dict[str, Any]]
    ran: Ran | None = None


class Ran(NamedTuple):
    """Passes put together from those measured, and the steps with and without these."""

    measured: MeasuredPasses
    rehearsed: Prediction
    predicted: Prediction


def table_rows(results: Sequence[Rehearsal]) -> list[dict[str, str]]:
    """A row a policy: rehearsed, with the standard error over the steps, and predicted beside it."""
    ran = [(one, one.ran.rehearsed, one.ran.predicted) for one in results if one.ran]
    return [
        {
            "policy": one.policy,
            "step, s": f"{mine.seconds.mean():.3f}",
            "predicted s": f"{predicted.seconds.mean():.3f}",
            "TFLOP/s a rank": f"{mine.flops_per_second / 1e12 / one.job.degrees.ranks:.4g}",
            "predicted TFLOP/s": f"{predicted.flops_per_second / 1e12 / one.job.degrees.ranks:.4g}",
            "tokens/s": Estimate.rate(mine.tokens, mine.seconds).text(",.0f"),
            "MFU": f"{mine.mfu:.1%}",
            "bubble": f"{mine.bubble:.1%}",
            "predicted bubble": f"{predicted.bubble:.1%}",
            "FLOPs x": speedup(mine, ran[0][1]).text(".3f"),
            "tokens x": f"{mine.tokens_per_second / ran[0][1].tokens_per_second:.3f}",
        }
        for one, mine, predicted in ran
    ]


def figures(prediction: Prediction) -> dict[str, Any]:
    """The JSON's figures: seconds of each step, and what follows from them."""
    tokens, flops = (Estimate.rate(a, prediction.seconds) for a in (prediction.tokens, prediction.flops))
    return {
        "seconds": prediction.seconds.tolist(),
        "pipeline_seconds": prediction.pipeline.tolist(),
        "communication_seconds": prediction.communication.tolist(),
        "optimizer_seconds": prediction.optimizer.tolist(),
        "tokens": prediction.tokens.tolist(),
        "flops": prediction.flops.tolist(),
        "tokens_per_second": tokens.value,
        "tokens_relative_error": tokens.relative,
        "flops_per_second": flops.value,
        "flops_relative_error": flops.relative,
        "mfu": prediction.mfu,
        "bubble": prediction.bubble,
        "peak_gib": [rank.total / 2**30 for rank in prediction.memory],
    }


def print_rank(one: Rehearsal, rank: dict[str, Any]) -> None:
    """What a rank ran and what it took; or its error."""
    make_console().print(f"Rank {rank['rank']} of {one.job.degrees.ranks}", style="bold", end="")
    say(*rank_lines(rank))


def rank_lines(rank: dict[str, Any]) -> list[str]:
    """A rehearsed rank, as lines of text."""
    lines = []
    if steps := rank.get("steps"):
        place = ", ".join(f"{axis} {number}" for axis, number in rank["coordinates"].items())
        first, last = steps[0]["iteration"] + 1, steps[-1]["iteration"] + 1
        runs = f"step {first}" if first == last else f"steps {first} to {last}"
        passes = [one for step in steps for one in step["passes"]]
        seconds = {
            kind: sum(one[4] for one in passes if one[0] == kind) / len(steps)
            for kind in PASSES
            if any(one[0] == kind for one in passes)
        }
        took = ", ".join(f"{PASSES[kind][0]} {value:.3f}" for kind, value in seconds.items())
        optimizer = mean(step["optimizer"] for step in steps)
        predicted = rank["predicted_gib"]
        lines.append(
            f" ({place or 'alone'}) on {rank['device']}: {runs}, all {len(passes)} passes of all "
            f"micro-batches. Seconds a step: {took}, optimizer {optimizer:.3f}."
        )
        if not rank["device"].startswith("CPU"):  # whose peak has Python and its libraries in it
            peak = f" Peak {max(step['peak_gib'] for step in steps):.2f} GiB"
            lines[-1] += f"{peak}." if predicted is None else f"{peak}, {predicted:.2f} predicted."
    if "error" in rank:
        lines.append(f" fails: {rank.get('traceback', '')}{rank['error']}")
    return lines


def write_report(folder: Path, results: Sequence[Rehearsal], typed: Sequence[str]) -> Path:
    """Draws what was rehearsed."""
    sections, cards, answer = [], [], "No rank came through."
    ran = {one.policy: one.ran for one in results if one.ran}
    if ran:
        base = next(iter(ran))
        gains = {policy: speedup(one.rehearsed, ran[base].rehearsed) for policy, one in ran.items()}
        best = max(gains, key=lambda policy: gains[policy].value)
        timelines: dict[str, list[Span]] = {}
        for one in results:
            if one.ran:
                timelines[f"{one.policy}, rehearsed"] = typical_step(one, one.ran, measured=True)
                timelines[f"{one.policy}, predicted"] = typical_step(one, one.ran, measured=False)
        for policy, (_, mine, predicted) in ran.items():
            times = mine.seconds.mean() / predicted.seconds.mean()
            cards.append(card(policy, mine, gains[policy], base, f"{times:.2f}x the predicted time"))
        answer = f"{gained(best, gains[best], base)}; {cost(ran[best].rehearsed.bubble, None)}"
        sections = [
            section("Steps put together", TOGETHER, table(table_rows(results))),
            section("A typical step", STEP, pipeline_charts(timelines)),
        ]
    for one in results:
        rows = [{"rank": str(r["rank"]), "what it ran": " ".join(rank_lines(r)).strip()} for r in one.ranks]
        sections.append(section(one.policy, "Each rank ran alone.", table(rows)))
    search = search_command(typed, results[0].job.degrees.ranks)
    corpus, about = described(results[0].job, results[0].documents)
    return write_page(
        folder,
        title=f"Rehearsed on one device: {corpus}",
        answer=answer,
        about=about,
        cards=cards,
        tries=[Try("What other degrees and schedules are predicted to be worth:", search)],
        sections=sections,
    )


TOGETHER = "Passes as measured, communication as the cluster's file has it; ± is the standard error."
STEP = "A row is a pipeline rank, a box a pass: strong where it was measured, pale where a like pass was."


def typical_step(one: Rehearsal, ran: Ran, *, measured: bool) -> list[Span]:
    """The slowest replica's passes in the step that comes nearest to the mean of those rehearsed."""
    seconds = ran.rehearsed.seconds
    number = int(abs(seconds - seconds.mean()).argmin())
    passes = ran.measured.of([number]) if measured else None
    spans, _ = step_timeline(one.job, one.plans[number], one.policy, measured=passes)
    return spans
