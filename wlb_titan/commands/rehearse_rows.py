"""What `wlb-titan rehearse` says of ranks and of steps put together, as rows and in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

from wlb_titan.commands.console import make_console

if TYPE_CHECKING:
    from wlb_titan.documents import Documents
    from wlb_titan.job import Job
    from wlb_titan.plan import Plan
    from wlb_titan.simulator.measured import Measured
    from wlb_titan.simulator.step import Prediction

WIDTH = 128
KINDS = {"F": "forward", "FB": "forward and backward", "L": "loss", "R": "recomputed", "B": "backward"}
KINDS |= {"I": "backward of inputs", "W": "backward of weights"}


@dataclass(frozen=True)
class Rehearsal:
    """What came of one policy.

    Attributes:
        policy: as it was asked for.
        job, documents, plans: what ran.
        ranks: results of the processes, also of those that failed.
        measured: passes put together from them.
        rehearsed, predicted: the steps with and without these; None where no rank came through.
    """

    policy: str
    job: Job
    documents: Documents
    plans: list[Plan]
    ranks: list[dict[str, Any]]
    measured: Measured | None = None
    rehearsed: Prediction | None = None
    predicted: Prediction | None = None


def table_rows(results: Sequence[Rehearsal]) -> list[dict[str, str]]:
    """A row a policy: rehearsed, with the standard error over the steps, and predicted beside it."""
    rows = []
    ran = [one for one in results if one.rehearsed is not None and one.predicted is not None]
    for one in ran:
        mine, predicted = one.rehearsed, one.predicted
        assert mine is not None and predicted is not None
        per_rank = 1e12 * one.job.degrees.ranks
        rows.append(
            {
                "policy": one.policy,
                "step, s": f"{mine.seconds.mean():.3f}",
                "predicted s": f"{predicted.seconds.mean():.3f}",
                "TFLOP/s a GPU": f"{mine.flops_per_second / per_rank:.4g}",
                "predicted TFLOP/s": f"{predicted.flops_per_second / per_rank:.4g}",
                "tokens/s": f"{mine.tokens_per_second:,.0f}{plus_minus(mine)}",
                "MFU": f"{mine.mfu:.1%}",
                "bubble": f"{mine.bubble:.1%}",
                "predicted bubble": f"{predicted.bubble:.1%}",
                "FLOPs x": ratio(mine, ran[0].rehearsed),
                "tokens x": f"{mine.tokens_per_second / ran[0].rehearsed.tokens_per_second:.3f}",  # type: ignore[union-attr]
            }
        )
    return rows


def plus_minus(prediction: Prediction) -> str:
    """The standard error of its tokens a second over its steps: ` ±1,200`."""
    if len(prediction.seconds) < 2:
        return ""
    return f" ±{prediction.tokens_per_second * prediction.relative_error:,.0f}"


def ratio(prediction: Prediction, baseline: Prediction | None) -> str:
    """FLOPs a second over the baseline's, with its standard error."""
    assert baseline is not None
    value = prediction.flops_per_second / baseline.flops_per_second
    if prediction is baseline or len(prediction.seconds) < 2:
        return f"{value:.3f}"
    error = value * math.hypot(prediction.flops_error, baseline.flops_error)
    return f"{value:.3f} ±{error:.3f}"


def figures(prediction: Prediction) -> dict[str, Any]:
    """Of the JSON: seconds of each step, and what follows from them."""
    several = len(prediction.seconds) > 1
    return {
        "seconds": prediction.seconds.tolist(),
        "pipeline_seconds": prediction.pipeline.tolist(),
        "communication_seconds": prediction.communication.tolist(),
        "optimizer_seconds": prediction.optimizer.tolist(),
        "tokens": prediction.tokens.tolist(),
        "flops": prediction.flops.tolist(),
        "tokens_per_second": prediction.tokens_per_second,
        "tokens_relative_error": prediction.relative_error if several else None,
        "flops_per_second": prediction.flops_per_second,
        "flops_relative_error": prediction.flops_error if several else None,
        "mfu": prediction.mfu,
        "bubble": prediction.bubble,
        "peak_gib": [rank.total / 2**30 for rank in prediction.memory],
    }


def print_rank(one: Rehearsal, rank: dict[str, Any]) -> None:
    """What a rank ran and what it took; or its error."""
    console = make_console(WIDTH)
    console.print(f"Rank {rank['rank']} of {one.job.degrees.ranks}", style="bold", end="")
    for line in rank_lines(rank):
        console.print(line, markup=False, soft_wrap=True)


def rank_lines(rank: dict[str, Any]) -> list[str]:
    """The same, as text."""
    lines = []
    if steps := rank.get("steps"):
        place = ", ".join(f"{axis} {number}" for axis, number in rank["coordinates"].items())
        first, last = steps[0]["iteration"] + 1, steps[-1]["iteration"] + 1
        runs = f"step {first}" if first == last else f"steps {first} to {last}"
        passes = [one for step in steps for one in step["passes"]]
        seconds = {
            kind: sum(one[4] for one in passes if one[0] == kind) / len(steps)
            for kind in KINDS
            if any(one[0] == kind for one in passes)
        }
        took = ", ".join(f"{KINDS[kind]} {value:.3f}" for kind, value in seconds.items())
        optimizer = mean(step["optimizer"] for step in steps)
        predicted = rank["predicted_gib"]
        lines.append(
            f" ({place or 'alone'}) on {rank['device']}: {runs}, all {len(passes)} passes of all "
            f"micro-batches. Seconds a step: {took}, optimizer {optimizer:.3f}. Peak "
            f"{max(step['peak_gib'] for step in steps):.2f} GiB"
            + ("." if predicted is None else f", {predicted:.2f} predicted.")
        )
    if "error" in rank:
        lines.append(f" fails: {rank.get('traceback', '')}{rank['error']}")
    return lines
