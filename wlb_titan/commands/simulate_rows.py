"""What `wlb-titan simulate` says of predictions, as rows and in words: on the console and in the report."""

from __future__ import annotations

import math

from wlb_titan.commands.plan_rows import FEW_STEPS
from wlb_titan.plan import Plan
from wlb_titan.policies import Policy
from wlb_titan.simulator.scenario import Scenario, network_sensitivity
from wlb_titan.simulator.search import Search
from wlb_titan.simulator.step import Prediction

SLOWER = 2.0  # the network, in the sensitivity column


def table_rows(
    scenario: Scenario, plans: dict[Policy, list[Plan]], predictions: dict[Policy, Prediction]
) -> list[dict[str, str]]:
    """Headings and cells of every policy, as the console and the report show them."""
    slower = network_sensitivity(scenario, plans, SLOWER)
    first = next(iter(predictions))
    rows = []
    for policy, prediction in predictions.items():
        most = prediction.peak_memory
        rows.append(
            {
                "policy": str(policy),
                "step, s": f"{prediction.seconds.mean():.3f}",
                "tokens/s": f"{prediction.tokens_per_second:,.0f}",
                "MFU": f"{prediction.mfu:.1%}",
                "bubble": f"{prediction.bubble:.1%}",
                "peak GiB": f"{most.total / 2**30:.1f}" + ("" if prediction.fits else " !"),
                "on rank": f"{most.rank}",
                "speedup": speedup(prediction, predictions[first]),
                "slow net": f"{slower[policy] / slower[first]:.3f}x",
            }
        )
    return rows


def speedup(prediction: Prediction, baseline: Prediction) -> str:
    """Tokens per second over the baseline's; of few steps with the standard error of that ratio."""
    ratio = prediction.tokens_per_second / baseline.tokens_per_second
    steps = len(prediction.seconds)
    if prediction is baseline or not 1 < steps < FEW_STEPS:
        return f"{ratio:.3f}x"
    error = ratio * math.hypot(prediction.relative_error, baseline.relative_error)
    return f"{ratio:.3f}x ±{error:.3f}"


def remarks(predictions: dict[Policy, Prediction]) -> list[str]:
    """What a reader must know besides the table: what does not fit, and what is extrapolated."""
    lines = []
    for policy, prediction in predictions.items():
        if not prediction.fits:
            memory = prediction.job.cluster.memory / 2**30
            lines.append(
                f"{policy} does not fit a GPU's {memory:.1f} GiB: {prediction.peak_memory.explain()}"
            )
    if all(prediction.job.degrees.ranks == 1 for prediction in predictions.values()):
        lines.append(
            "One GPU waits for no other, so balance saves it no time: what a balanced policy gains is whole "
            "documents, in which a token attends to more. Compare MFU, not tokens/s."
        )
    lines += [p.extrapolated for p in predictions.values() if p.extrapolated][:1]
    return lines


def gain(result: Search) -> str:
    """A sentence on what the best gain over the job as it is configured."""
    best, own = result.found[0], result.configured
    if own is None:
        return "The configured degrees are of other GPUs or do not fit, so there is no gain to name."
    faster = best.tokens_per_second / own.tokens_per_second
    words = [f"{one.job.degrees}, {one.pipeline}, {one.policy}" for one in (best, own)]
    return f"The best ({words[0]}) is {faster:.2f}x as fast as the configured job at its best ({words[1]})."


def search_rows(result: Search) -> list[dict[str, str]]:
    """Headings and cells of the candidates, the fastest first."""
    best = result.found[0].tokens_per_second
    return [
        {
            "degrees": str(found.job.degrees),
            "schedule": found.pipeline,
            "policy": str(found.policy),
            "L_max": f"{found.job.longest_micro_batch:,}",
            "step, s": f"{found.prediction.seconds.mean():.3f}",
            "tokens/s": f"{found.tokens_per_second:,.0f}",
            "MFU": f"{found.prediction.mfu:.1%}",
            "bubble": f"{found.prediction.bubble:.1%}",
            "peak GiB": f"{found.prediction.peak_memory.total / 2**30:.1f}",
            "of best": f"{found.tokens_per_second / best:.1%}",
        }
        for found in result.found
    ]
