"""`wlb-titan compare`: what runs differ in, and what came of it, as their dump folders tell.

Neither torch nor torchtitan is imported, so runs of other machines can be looked at anywhere.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import click
import numpy as np

from wlb_titan.arrays import Bools, Floats
from wlb_titan.commands import page
from wlb_titan.commands.command_line import Rows, report_option, say, show_table
from wlb_titan.commands.page import command, cost, gained, lines, pipelines, section, table, write_page
from wlb_titan.errors import UserError, reading, regular
from wlb_titan.files import load
from wlb_titan.runtime.dump_folder import BENCH_FILE, CONFIG_FILE, METRICS_FILE, TRACES, VALIDATION_FILE
from wlb_titan.simulator.measured import Pass
from wlb_titan.simulator.trace import read_trace
from wlb_titan.summary import Estimate, bench_rows, best_in_turns
from wlb_titan.toml.sources import read_sources
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
    with reading(lambda reason: UserError(f"{path} is not what a bench writes: {reason}.")):
        records = load(dict[str, list[dict[str, Any]]], path)["policies"]
        return bench_rows(records), best_in_turns(records)


def show_bench(folder: Path) -> None:
    rows, answer = bench_of(folder)
    show_table(rows)
    say(answer)


@dataclass(frozen=True)
class Run:
    """A finished or running job, read from its dump folder."""

    name: str  # what tables and pictures call it
    folder: Path
    settings: Mapping[str, Any]  # its resolved configuration, by dotted key
    records: Sequence[Mapping[str, Any]]  # of metrics.jsonl, one for each logged step, in order
    validation: tuple[Floats, Floats]  # steps and losses of validation.jsonl, float64 (validations,)

    def series(self, key: str) -> tuple[Floats, Floats]:
        """Steps and values, float64 (records,), of the records that have `key`."""
        points = [(r["step"], r[key]) for r in self.records if isinstance(r.get(key), int | float)]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return np.array(steps, dtype=float), np.array(values, dtype=float)

    def mean(self, key: str) -> float | None:
        """Over the records that have `key`; None without one."""
        values = self.series(key)[1]
        return float(values.mean()) if len(values) else None

    @cached_property
    def seconds(self) -> Floats:
        """float64 (records,), wall time of the steps that each record covers."""
        return np.array([r["seconds"] * r["steps"] for r in self.records])

    @cached_property
    def tokens(self) -> Floats:
        """float64 (records,), tokens of documents trained up to each record."""
        return np.cumsum(np.array([r["tokens_per_second"] for r in self.records]) * self.seconds)

    @property
    def settled(self) -> Bools:
        """bool (records,), whose time counts: all but the first of each process, which includes the start;
        these if there are no others."""
        settled = np.array([not r.get("start") for r in self.records])
        return settled if settled.any() else ~settled

    def rate(self, key: str) -> Estimate | None:
        """Mean of a rate over the settled records' time, without its error if they are fewer than three; None
        if not all records have it."""
        steps, rates = self.series(key)
        if len(steps) < len(self.records):
            return None
        seconds = self.seconds[self.settled]
        estimate = Estimate.rate(rates[self.settled] * seconds, seconds)
        return estimate if len(seconds) > 2 else Estimate(estimate.value)

    def loss_at(self, tokens: float) -> float:
        """Mean loss of the last tenth of the run up to `tokens`; the nearest record's if that has none."""
        losses = np.array([r["loss"] for r in self.records])
        last = (self.tokens > 0.9 * tokens) & (self.tokens <= tokens * (1 + 1e-9))
        if not last.any():
            return float(losses[np.argmin(np.abs(self.tokens - tokens))])
        return float(np.average(losses[last], weights=np.diff(self.tokens, prepend=0.0)[last]))

    @property
    def slow_ranks(self) -> list[str]:
        """Those that were named in most traced steps."""
        traced = [r["slow_ranks"] for r in self.records if "slow_ranks" in r]
        named = [said.partition(" takes ")[0] for step in traced for said in step]
        return [name for name in dict.fromkeys(named) if 2 * named.count(name) > len(traced)]

    @property
    def peak_gib(self) -> float | None:
        """GiB, the most of any rank of a pipeline, or else of the reporting rank; None if unknown."""
        stages = [v for r in self.records for k, v in r.items() if k.startswith("peak_memory_gib/")]
        return max(stages or [r.get("memory_gib", 0.0) for r in self.records]) or None

    @cached_property
    def traced(self) -> list[int]:
        names = [path.stem.removeprefix("step-") for path in (self.folder / TRACES).glob("step-*.json")]
        return sorted(map(int, filter(str.isdecimal, names)))


def open_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads dump folders; a run is called by its folder's name, or its path where names are the same."""
    folders = list(dict.fromkeys(Path(os.path.normpath(folder)) for folder in folders))
    names = [folder.name for folder in folders]
    unique = len(set(names)) == len(names) and all(names)
    return [open_run(folder, folder.name if unique else str(folder)) for folder in folders]


def open_run(folder: Path, name: str) -> Run:
    for file in (CONFIG_FILE, METRICS_FILE):
        if not (folder / file).is_file():
            others = sorted(path.parent.name for path in folder.glob(f"*/{METRICS_FILE}"))[:5]
            hint = "Name the dump_folder of a run that has finished its first step."
            if others:
                hint = f"These folders in it are runs: {', '.join(others)}."
            raise UserError(f"{folder}: there is no {file} in it. {hint}")
    settings = read_sources(folder / CONFIG_FILE).written()
    return Run(name, folder, settings, _records(folder / METRICS_FILE), _validation(folder / VALIDATION_FILE))


def _records(path: Path) -> list[dict[str, Any]]:
    """Those of the logged steps; a last line without its end is still being written."""
    records: list[dict[str, Any]] = []
    what = "this line is not a valid record of metrics"
    with reading(lambda reason: UserError(f"{path}:{len(records) + 1}: {what}: {reason}.")):
        for line in regular(path).read_bytes().split(b"\n")[:-1]:
            records.append(_record(json.loads(line), records[-1]["step"] if records else 0))
    if not records:
        raise UserError(f"{path}: no step has been logged yet.")
    return records


def _validation(path: Path) -> tuple[Floats, Floats]:
    with reading(lambda reason: UserError(f"{path} is not a valid record of validations: {reason}.")):
        lines = regular(path).read_bytes().split(b"\n")[:-1] if path.exists() else []
        points = [itemgetter("step", "loss")(json.loads(line)) for line in lines]
        steps, losses = np.array(points, dtype=float).reshape(-1, 2).T
        if not (np.isfinite(losses).all() and (np.diff(steps) > 0).all()):
            raise ValueError("losses or steps are not numbers in order")
        return steps, losses


def _record(record: dict[str, Any], last: int) -> dict[str, Any]:
    """A logged step, if it has what figures are made from and comes after step `last`."""
    step, steps, seconds, rate = itemgetter("step", "steps", "seconds", "tokens_per_second")(record)
    peaks = [value for key, value in record.items() if key.startswith(("memory_gib", "peak_memory_gib/"))]
    if not all(type(value) in (int, float) for value in (seconds, rate, record["loss"], *peaks)):
        raise ValueError("a figure is not a number")
    if type(step) is not int or type(steps) is not int or not step > last or steps < 1:
        raise ValueError(f"step {step!r} of {steps!r} steps after step {last}")
    if not (0 < seconds < math.inf and 0 < rate < math.inf):
        raise ValueError(f"{rate} tokens a second in {seconds} seconds")
    return record


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
    search = command("simulate", [str(best.folder / CONFIG_FILE)], "--search")
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


def traced_steps(runs: Sequence[Run]) -> dict[str, list[Pass]]:
    """The last step that all runs traced, or each run's own last; the first data-parallel rank's passes."""
    traced = [run for run in runs if run.traced]
    common = set.intersection(*(set(run.traced) for run in traced)) if traced else set()
    timelines = {}
    for run in traced:
        step = max(common or run.traced)
        passes = read_trace(run.folder / TRACES / f"step-{step}.json")
        timelines[f"{run.name}, step {step}"] = [p for p in passes if p.replica == passes[0].replica]
    return timelines
