"""`wlb-titan compare`: what runs differ in, and what came of it, as their dump folders tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import click
import numpy as np

from wlb_titan.commands import page
from wlb_titan.commands.command_line import Rows, report_option, say, show_table
from wlb_titan.commands.page import (
    Timed,
    gained,
    lines,
    next_section,
    section,
    table,
    time_sections,
    try_next,
    waits,
    write_page,
)
from wlb_titan.errors import UserError, refusing
from wlb_titan.files import load
from wlb_titan.runs import BENCH_FILE, CONFIG_FILE, TURNS, Run, open_runs, read_trace, traced_steps
from wlb_titan.simulator.measured import FLOPS, Pass
from wlb_titan.summary import Estimate, bench_rows, best_in_turns, fastest
from wlb_titan.toml.values import shown

NOT_KNOWN = "–"
RATES = {"model_tflops": "FLOPs", "tokens_per_second": "tokens"}


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN [RUN]...")
@report_option
def compare(folders: tuple[Path, ...], report: Path | None) -> None:
    """Put the metrics of training runs side by side; the first is the baseline.

    RUN is the dump_folder of a run, which may still be training, or of a bench:

    \b
    wlb-titan compare outputs/plain outputs/balanced --report outputs/compare

    The differences of their configurations come first. The loss is compared after equally many tokens. The
    first record after each start is excluded because it includes start-up time. See docs/metrics.md.
    """
    benches = [bench_of(folder) for folder in folders if (folder / BENCH_FILE).is_file()]
    for records, _ in benches:
        if report is None:  # else the page has it
            show_table(bench_rows(records))
        say(f"{best_in_turns(records)}.")
    if runs := open_runs([folder for folder in folders if not (folder / BENCH_FILE).is_file()]):
        if settings := setting_rows(runs):
            show_table(settings)
        show_table(figure_rows(runs))
        say(*remarks(runs))
    if report is not None:
        click.echo(f"Report: {write_report(report, benches, runs)}")


Bench = tuple[list[dict[str, Any]], dict[str, Timed]]
"""Records of policies, and their steps, as fast over the first one's as the median over rounds."""


def bench_of(folder: Path) -> Bench:
    path = folder / BENCH_FILE
    with refusing(lambda reason: UserError(f"{path} is not what a bench writes: {reason}.")):
        records = load(dict[str, list[dict[str, Any]]], path)["policies"]
        bench_rows(records), best_in_turns(records)
        steps = {}
        for record in records:
            trace, whole = folder / TURNS / f"step-{record['step']}.json", sum(record["parts"].values())
            speed = records[0]["flops_per_second"] * record["over_first"]
            if not (0 < whole < inf and 0 < speed < inf):
                raise ValueError(f"the steps of {record['policy']} took no time")
            steps[record["policy"]] = timed(
                record["parts"], speed, read_trace(trace) if trace.is_file() else []
            )
        return records, steps


def run_steps(runs: Sequence[Run]) -> dict[str, Timed]:
    """The steps of runs that were traced."""
    passes, rates = traced_steps(runs), {run.name: run.rate("model_tflops") for run in runs}
    known = [(run, rate) for run in runs if (rate := rates[run.name]) and rate.value > 0 and run.parts]
    return {run.name: timed(run.parts, rate.value * 1e12, passes.get(run.name, [])) for run, rate in known}


def timed(parts: page.Parts, speed: float, passes: Sequence[Pass]) -> Timed:
    """`passes` of a trace, of which the first data-parallel rank's are drawn."""
    flops = next((p.facts[FLOPS] for p in passes if FLOPS in p.facts), 0.0)
    return Timed(parts, speed, [p for p in passes if p.replica == passes[0].replica], flops)


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Settings that differ, by dotted key: all runs' values (None: not set), but not the dump folder."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "dump_folder")
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: by_run for key, by_run in values.items() if any(value != by_run[0] for value in by_run)}


def setting_rows(runs: Sequence[Run]) -> Rows:
    return [
        {"setting": key}
        | {run.name: NOT_KNOWN if v is None else shown(v) for run, v in zip(runs, values, strict=True)}
        for key, values in differences(runs).items()
    ]


def figure_rows(runs: Sequence[Run]) -> Rows:
    """A row for each figure that some run has."""
    tokens = float(min(run.tokens[-1] for run in runs))  # that all have trained on
    figures: list[tuple[str, str, Callable[[Run], float | Estimate | None]]] = [
        ("steps", ",d", lambda run: run.records[-1]["step"]),
        ("tokens", ",.0f", lambda run: run.tokens[-1]),
        (f"loss after {tokens:,.0f} tokens", ".4f", lambda run: run.loss_at(tokens)),
        ("loss of the last validation", ".4f", lambda run: next(reversed(run.validation[1]), None)),
        ("model TFLOP/s", ",.3g", lambda run: run.rate("model_tflops")),
        ("tokens a second", ",.0f", lambda run: run.rate("tokens_per_second")),
        ("MFU", ".1%", lambda run: getattr(run.rate("mfu_documents"), "value", None)),
        ("imbalance, predicted", ".3f", lambda run: run.mean("imbalance")),
        ("imbalance, measured", ".3f", lambda run: run.mean("measured_imbalance")),
        ("bubble, measured", ".1%", lambda run: run.mean("bubble")),
        ("tokens cut off from their document's start", ".1%", lambda run: run.mean("cut_share")),
        ("delay, iterations", ".2f", lambda run: run.mean("delay_mean")),
        ("peak memory, GiB", ".2f", lambda run: run.peak_gib),
    ]
    rows = [{"figure": name} | {run.name: _cell(of(run), form) for run in runs} for name, form, of in figures]
    return [row for row in rows if any(row[run.name] != NOT_KNOWN for run in runs)]


def _cell(value: float | Estimate | None, form: str) -> str:
    if value is None:
        return NOT_KNOWN
    if not isinstance(value, Estimate):
        return format(value, form)
    return format(value.value, form) + ("" if value.relative is None else f" ±{value.relative:.1%}")


def remarks(runs: Sequence[Run]) -> list[str]:
    """What the figures say, in words, and what they cannot."""
    first, *others = runs
    said = [] if setting_rows(runs) or not others else ["The configurations are the same."]
    alone, kinds = False, [run for run in others if alike(run, runs)[0] is run]
    for run in kinds or others:
        if ratios := _gains(run, first, runs):
            parts = " and ".join(f"{ratio.text('.2f', 'x')} the {what}" for what, ratio in ratios.items())
            said.append(f"{run.name} trains on {parts} a second of {first.name}.")
            alone = alone or all(ratio.error is None for ratio in ratios.values())
    if alone:
        said.append(
            "Machines drift between runs: with one run of a kind, differences below some 20 % say nothing. "
            "`wlb-titan bench` measures policies in turns."
        )
    said += [f"{run.name}: {name} was slow in most traced steps." for run in runs for name in run.slow_ranks]
    corpora = [key for key in differences(runs) if key.startswith("wlb.corpus.") and key != "wlb.corpus.seed"]
    if corpora:
        said.append(f"{', '.join(corpora)} differ: losses say nothing about each other.")
    return said


def alike(run: Run, runs: Sequence[Run]) -> list[Run]:
    """The runs of a kind: those that differ from `run` in the dump folder and the seed of weights at most."""
    return [other for other in runs if not differences([run, other]).keys() - {"debug.seed"}]


def _gains(run: Run, first: Run, runs: Sequence[Run]) -> dict[str, Estimate]:
    """FLOPs and tokens a second over the first run's, where both have them; means of the runs of a kind, with
    the error of what differs between these. The scatter of one run's steps does not have the drift."""
    gains, shared = {}, run in alike(first, runs)
    for key, what in RATES.items():
        kinds = [[other.rate(key) for other in ([of] if shared else alike(of, runs))] for of in (run, first)]
        rates = [np.array([rate.value for rate in kind if rate]) for kind in kinds]
        if all(rate.any() for rate in rates):
            mean, base = map(Estimate.mean, rates)
            gains[what] = mean.over(base)
    return gains


LOSS = "By tokens is the fair one: steps of policies differ in their tokens."


def write_report(folder: Path, benches: Sequence[Bench], runs: Sequence[Run]) -> Path:
    """Policies in turns come first, as machines drift between runs."""
    sections, heads, several = [], [], len(runs) > 1
    for records, steps in benches:
        best, base = fastest(records)["policy"], records[0]["policy"]
        heads.append((f"{_listed(steps)} in turns", best_in_turns(records) + waits(steps, best, base)))
        train = [(page.TRAIN, f"--wlb.policy {best}")] if best != base else []
        sections += time_sections(steps, "measured in all rounds", "The round nearest to the median gain")
        sections += [next_section(train), section("Policies in turns", "", table(bench_rows(records)))]
    if runs:
        steps, (best, answer) = run_steps(runs), _answer(runs)
        heads.append((_listed(run.name for run in runs), answer + waits(steps, best, runs[0].name)))
        if not benches or several:
            which = "The last step that all traced, or each run's own last"
            file = next(run.folder for run in runs if run.name == best) / CONFIG_FILE
            search = ("Other degrees and schedules:", try_next("simulate", [str(file)], "--search"))
            sections += [*time_sections(steps, "measured in traced steps", which), next_section([search])]
        by_tokens = {run.name: (run.tokens, run.series("loss")[1]) for run in runs}
        losses = [lines("loss, by tokens", by_tokens)] if several else []
        losses.append(lines("loss, by step", {run.name: run.series("loss") for run in runs}))
        validation = lines("loss, by step", {run.name: run.validation for run in runs})
        sections += [
            section("What differs", "", table(setting_rows(runs)) or "No setting." * several),
            section("Figures", " ".join(remarks(runs)), table(figure_rows(runs))),
            section("Loss", LOSS * several, *losses),
            section("Validation", "", validation),
        ]
    title, answer = heads[0]
    return write_page(folder, title=title, answer=answer, sections=sections)


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _answer(runs: Sequence[Run]) -> tuple[str, str]:
    """The name of the fastest run but the first, and what it gains."""
    first, *others = runs
    if not others:
        return first.name, f"{first.name} has trained on {first.tokens[-1]:,.0f} tokens"
    gains = {run.name: next(iter(_gains(run, first, runs).items())) for run in others}
    best = max(gains, key=lambda name: gains[name][1].value)
    what, ratio = gains[best]
    return best, gained(best, ratio, first.name, what)
