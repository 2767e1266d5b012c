"""`wlb-titan compare`: what runs differ in, and what came of it, as their dump folders tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from wlb_titan.commands import page
from wlb_titan.commands.command_line import Rows, report_option, say, show_table
from wlb_titan.commands.page import cost, gained, lines, pipelines, section, table, try_next, write_page
from wlb_titan.errors import UserError, refusing
from wlb_titan.files import load
from wlb_titan.runs import BENCH_FILE, CONFIG_FILE, Run, open_runs, traced_steps
from wlb_titan.summary import Estimate, bench_rows, best_in_turns
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
    benches = {folder: bench_of(folder) for folder in folders if (folder / BENCH_FILE).is_file()}
    for folder in benches:
        show_bench(folder)
    turns = [section("Policies in turns", answer, table(rows)) for rows, answer in benches.values()]
    if runs := open_runs([folder for folder in folders if folder not in benches]):
        if settings := setting_rows(runs):
            show_table(settings)
        show_table(figure_rows(runs))
        say(*remarks(runs))
    if report is not None:
        alone = None if runs else benches[folders[0]]
        written = page.write_turns(report, alone, turns) if alone else write_report(report, runs, turns)
        click.echo(f"Report: {written}")


def bench_of(folder: Path) -> tuple[Rows, str]:
    """A bench's table, and its answer."""
    path = folder / BENCH_FILE
    with refusing(lambda reason: UserError(f"{path} is not what a bench writes: {reason}.")):
        records = load(dict[str, list[dict[str, Any]]], path)["policies"]
        return bench_rows(records), best_in_turns(records)


def show_bench(folder: Path) -> None:
    rows, answer = bench_of(folder)
    show_table(rows)
    say(answer)


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
PASSES = "Measured passes: a row is a rank. Time is relative to the work of a rank, as documents differ."


def write_report(folder: Path, runs: Sequence[Run], turns: Sequence[str]) -> Path:
    first = runs[0]
    corpora = {Path(str(run.settings.get("wlb.corpus.path", "runs"))).name for run in runs}
    if any("wlb.corpus.sources.0.path" in run.settings for run in runs):
        corpora = {"a mixture"}
    gains = {run.name: _gains(run, first, runs) for run in runs}
    none = Estimate(0.0)
    best = max(runs[1:] or runs, key=lambda run: next(iter(gains[run.name].values()), none).value)
    gain = next(iter(gains[best.name].items()), None)
    figures = figure_rows(runs)
    search = try_next("simulate", [str(best.folder / CONFIG_FILE)], "--search")
    by_step = {run.name: run.series("loss") for run in runs}
    by_tokens = {run.name: (run.tokens, run.series("loss")[1]) for run in runs}
    return write_page(
        folder,
        title=f"{' and '.join(sorted(corpora))}: {len(runs)} runs side by side",
        answer=_answer(best, first, gain),
        cards=[{"": run.name} | {row["figure"]: row[run.name] for row in figures} for run in runs],
        figure="model TFLOP/s" if "FLOPs" in gains[first.name] else "tokens a second",
        facts=("tokens a second", "imbalance, measured", "imbalance, predicted", "bubble, measured"),
        tries=[("What other degrees and schedules are worth to it:", search)],
        sections=[
            *turns,
            section("What differs", "", table(setting_rows(runs)) or "No setting."),
            section("Figures", " ".join(remarks(runs)), table(figures)),
            section("A step", PASSES, pipelines(traced_steps(runs))),
            section("Loss", LOSS, lines("loss, by tokens", by_tokens), lines("loss, by step", by_step)),
            section("Validation", "", lines("loss, by step", {run.name: run.validation for run in runs})),
        ],
    )


def _answer(run: Run, first: Run, gain: tuple[str, Estimate] | None) -> str:
    imbalance = run.mean("measured_imbalance")
    still = cost(run.mean("bubble"), run.mean("imbalance") if imbalance is None else imbalance)
    if gain is None:
        return f"In {run.name} {still}"
    what, ratio = gain
    return f"{gained(run.name, ratio, first.name, what)}; {still}"
