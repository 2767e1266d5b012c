"""`wlb-titan simulate` about predictions: rows and sentences for the console, and the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from wlb_titan.commands.report.charts import PALETTE, bars, lines, stacked
from wlb_titan.commands.report.estimate import Estimate, cost, gained
from wlb_titan.commands.report.page import (
    Card,
    Try,
    choice_section,
    command,
    described,
    search_command,
    section,
    table,
    write_page,
)
from wlb_titan.commands.report.pipeline import pipeline_charts
from wlb_titan.errors import UserError
from wlb_titan.memory.rank import GIB, TERMS
from wlb_titan.plan import Plan
from wlb_titan.policies import Policy
from wlb_titan.simulator.choice import Choice
from wlb_titan.simulator.scenario import Scenario, network_sensitivity
from wlb_titan.simulator.search import Search, pipeline_words
from wlb_titan.simulator.step import Prediction
from wlb_titan.simulator.timeline import MemoryCurve, Step

SLOWER = 2.0  # the network, in the sensitivity column
NONE: Mapping[Policy, UserError] = {}


def table_rows(
    scenario: Scenario,
    plans: dict[Policy, list[Plan]],
    predictions: dict[Policy, Prediction],
    impossible: Iterable[Policy] = (),
) -> list[dict[str, str]]:
    """Headings and cells of every policy, as the console and the page show them; those that are not possible
    have no figures."""
    slower = network_sensitivity(scenario, plans, SLOWER)
    first = next(iter(predictions))
    base = predictions[first]
    rows = [
        {
            "policy": str(policy),
            **_figures(one),
            "on rank": f"{one.peak_memory.rank}",
            "speedup": speedup(one, base).text(".3f", "x"),
            "in tokens": f"{one.tokens_per_second / base.tokens_per_second:.3f}x",
            "slow net": f"{slower[policy] / slower[first]:.3f}x",
        }
        for policy, one in predictions.items()
    ]
    return rows + [dict.fromkeys(rows[0], "–") | {"policy": str(policy)} for policy in impossible]


def _figures(one: Prediction) -> dict[str, str]:
    return {
        "step, s": f"{one.seconds.mean():.3f}",
        "tokens/s": f"{one.tokens_per_second:,.0f}",
        "MFU": f"{one.mfu:.1%}",
        "bubble": f"{one.bubble:.1%}",
        "peak GiB": f"{one.peak_memory.total / GIB:.1f}" + ("" if one.fits else " !"),
    }


def speedup(prediction: Prediction, baseline: Prediction) -> Estimate:
    """FLOPs a second over the baseline's, which cut documents do not flatter as tokens do."""
    mine, base = (Estimate.rate(one.flops, one.seconds) for one in (prediction, baseline))
    return mine.over(base)


def remarks(
    predictions: Mapping[Policy, Prediction], impossible: Mapping[Policy, UserError] = NONE
) -> list[str]:
    """What a reader must know besides the table: what is not possible, does not fit or is extrapolated."""
    said = [f"{policy} is not possible here: {error}" for policy, error in impossible.items()]
    for policy, prediction in predictions.items():
        if not prediction.fits:
            room = prediction.job.fitting.room
            said.append(f"{policy} does not fit {room}: {prediction.peak_memory.explain()}")
    if all(prediction.job.degrees.ranks == 1 for prediction in predictions.values()):
        said.append(
            "One GPU waits for no other, so balance saves it no time: what a balanced policy gains is whole "
            "documents, in which a token attends to more. Compare the speedup or MFU, not tokens/s."
        )
    said += [p.extrapolated for p in predictions.values() if p.extrapolated][:1]
    return said


def gain(result: Search) -> str:
    """A sentence on what the best gain over the job as it is configured."""
    best, own = result.found[0], result.configured
    if own is None:
        return "The configured degrees are of other GPUs or do not fit, so there is no gain to name."
    words = [f"{one.job.degrees}, {pipeline_words(one.job)}, {one.job.policy}" for one in (best, own)]
    return (
        f"The best ({words[0]}) does {best.flops_per_second / own.flops_per_second:.2f}x the FLOPs and "
        f"{best.tokens_per_second / own.tokens_per_second:.2f}x the tokens a second of the configured job at "
        f"its best ({words[1]})."
    )


def search_rows(result: Search) -> list[dict[str, str]]:
    """Headings and cells of the candidates, the fastest first."""
    best = result.found[0].flops_per_second
    return [
        {
            "degrees": str(found.job.degrees),
            "schedule": pipeline_words(found.job),
            "policy": str(found.job.policy),
            "L_max": f"{found.job.longest_micro_batch:,}",
            **_figures(found),
            "of best": f"{found.flops_per_second / best:.1%}",
        }
        for found in result.found
    ]


def write_report(
    folder: Path,
    scenario: Scenario,
    plans: dict[Policy, list[Plan]],
    predictions: dict[Policy, Prediction],
    impossible: Mapping[Policy, UserError],
    steps: Mapping[Policy, Step],
    choices: Sequence[Choice],
    typed: Sequence[str],
) -> Path:
    """Draws what was simulated.

    Args:
        plans, predictions: plans and predictions of each policy, the baseline first.
        impossible: why other policies have none.
        steps: timeline and memory of a typical step of each policy.
        choices: what `auto` stands for in a policy, where it does.
        typed: what the command line names, as of `page.command`.
    """
    named = {str(policy): prediction for policy, prediction in predictions.items()}
    imbalances = {str(policy): float(np.mean([p.imbalance for p in own])) for policy, own in plans.items()}
    base = next(iter(named))
    gains = {name: speedup(one, named[base]) for name, one in named.items()}
    fitting = [name for name, one in named.items() if one.fits] or list(named)
    best = max(fitting, key=lambda name: gains[name].value)
    degrees = named[best].job.degrees
    waited = imbalances[best] if degrees.pipeline * degrees.data > 1 else None  # by none on one replica
    parts = {name: _step_parts(one) for name, one in named.items()}
    seconds = {name: Estimate.mean(one.seconds) for name, one in named.items()}
    drawn = {str(policy): step for policy, step in steps.items()}
    sections = [
        *map(choice_section, choices),
        section(
            "Policies",
            " ".join(remarks(predictions, impossible)),
            table(table_rows(scenario, plans, predictions, impossible)),
        ),
        section("What it gains", OVER.format(base), bars("FLOPs a second, times", gains)),
        section(
            "Where the time of a step goes", TIME, stacked("", "seconds", parts, totals=seconds, palette=BUSY)
        ),
        section("A typical step", STEP, pipeline_charts({name: spans for name, (spans, _) in drawn.items()})),
        section("Activations over that step", HELD, *(_held(name, own) for name, (_, own) in drawn.items())),
        section("Peak memory", PEAK, *(_peak_memory(name, one) for name, one in named.items())),
    ]
    corpus, about = described(scenario.job, scenario.documents)
    return write_page(
        folder,
        title=f"What balance is worth: {corpus}",
        answer=f"{gained(best, gains[best], base)}; {cost(named[best].bubble, waited)}",
        about=about,
        cards=[
            card(name, one, gains[name], base, f"imbalance {imbalances[name]:.3f}")
            for name, one in named.items()
        ],
        tries=_tries(best, named[best], typed),
        sections=sections,
    )


OVER = "Over {}. The line on a bar is the standard error, as far as these steps tell it."
TIME = "Mean of the steps, with its standard error. A GPU computes, or it waits for others."
STEP = "The slowest data-parallel replica. A row is a pipeline rank, a box a pass of one micro-batch."
HELD = "GiB on one GPU of each pipeline rank, at the end of each pass."
PEAK = "By pipeline rank, the largest of all steps; the line is what a GPU has."
BUSY = (PALETTE[2], PALETTE[0], PALETTE[3])


def card(name: str, one: Prediction, gain: Estimate, base: str, *more: str) -> Card:
    """What matters most of a prediction: what it gains, `more`, and what it costs."""
    facts = (
        "the baseline" if name == base else f"the FLOPs a second of {base}",
        *more,
        f"bubble {one.bubble:.1%}, MFU {one.mfu:.1%}",
        f"{one.tokens_per_second:,.0f} tokens a second",
        f"{one.peak_memory.total / GIB:.1f} of {one.job.cluster.memory / GIB:.0f} GiB",
    )
    return Card(name, gain.text(".2f", "x"), facts)


def _tries(best: str, prediction: Prediction, typed: Sequence[str]) -> list[Try]:
    why = "Other degrees and schedules of as many GPUs"
    why += f", as a GPU waits for {prediction.bubble:.0%} of the step:" if prediction.bubble >= 0.1 else ":"
    tries = [Try(why, search_command(typed, prediction.job.degrees.ranks))]
    if "--lengths" not in typed:
        dryrun = command("dryrun", typed, "--policy", ":".join(prediction.job.policy))
        tries.append(Try(f"Whether {best} runs, and what it takes, traced on this machine:", dryrun))
    return tries


def _step_parts(one: Prediction) -> dict[str, float]:
    busy, sent = float(one.busy.mean()), float(one.communication.mean())
    waiting = float(one.seconds.mean()) - busy - sent
    return {"busy": busy, "waiting": waiting, "data-parallel communication": sent}


def _held(name: str, ranks: Sequence[MemoryCurve]) -> str:
    curves = {f"pp {one.rank}": (one.seconds, one.bytes_ / GIB) for one in ranks}
    return lines(name, "seconds", curves, zero=True, interpolate="step-after")


def _peak_memory(name: str, one: Prediction) -> str:
    terms = {
        f"pp {rank.rank}": {term.replace("_", " "): getattr(rank, term) / GIB for term in TERMS}
        for rank in one.memory
    }
    return stacked(name, "GiB", terms, limit=one.job.cluster.memory / GIB)
