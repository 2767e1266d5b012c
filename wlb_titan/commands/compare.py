"""`wlb-titan compare`: what runs differ in, and what came of it, as their dump folders tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from wlb_titan.commands import page
from wlb_titan.commands.command_line import Rows, report_option, say, show_table
from wlb_titan.commands.page import Timed, gained, lines, section, table, time_sections, try_next, waits
from wlb_titan.errors import UserError, refusing
from wlb_titan.files import checked, load
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
    benches = {folder: bench_of(folder) for folder in folders if (folder / BENCH_FILE).is_file()}
    for records in benches.values():
        if report is None:  # else the page has it
            show_table(bench_rows(records))
        say(f"{best_in_turns(records)}.")
    if runs := open_runs([folder for folder in folders if folder not in benches]):
        if settings := setting_rows(runs):
            show_table(settings)
        show_table(figure_rows(runs))
        say(*remarks(runs))
    if report is not None:
        click.echo(f"Report: {write_report(report, benches, runs)}")


def bench_of(folder: Path) -> list[dict[str, Any]]:
    """The records of a bench's policies."""
    path = folder / BENCH_FILE
    with refusing(lambda reason: UserError(f"{path} is not what a bench writes: {reason}.")):
        records: list[dict[str, Any]] = load(dict[str, list[dict[str, Any]]], path)["policies"]
        bench_rows(records), best_in_turns(records), bench_steps(folder, records)
        return records


def bench_steps(folder: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, Timed]:
    """The policies' steps, as fast over the first one's as the median over rounds says."""
    first, steps = records[0], {}
    for record in records:
        path = folder / TURNS / f"step-{record['step']}.json"
        passes = read_trace(path) if path.is_file() else []
        parts = checked(dict[str, float], record["parts"])
        speed = first["flops_per_second"] * record["over_first"]
        if not (sum(parts.values()) > 0 and speed > 0):
            raise ValueError(f"{record['policy']} took no time")
        steps[record["policy"]] = timed(parts, speed, passes)
    return steps


def run_steps(runs: Sequence[Run]) -> dict[str, Timed]:
    """The steps of runs that were traced."""
    passes, steps = traced_steps(runs), {}
    for run in runs:
        if (rate := run.rate("model_tflops")) and rate.value > 0 and run.parts:
            steps[run.name] = timed(run.parts, rate.value * 1e12, passes.get(run.name, []))
    return steps


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


def write_report(folder: Path, benches: Mapping[Path, Sequence[dict[str, Any]]], runs: Sequence[Run]) -> Path:
    """Policies in turns come first, as machines drift between runs."""
    sections, heads = [], []
    for bench, records in benches.items():
        steps, best, base = bench_steps(bench, records), fastest(records)["policy"], records[0]["policy"]
        heads.append((f"{_listed(steps)} in turns", best_in_turns(records), waits(steps, best, base)))
        sections += time_sections(steps, "measured in all rounds", "The round nearest to the median gain")
        if best != base:
            sections.append(page.next_section([(page.TRAIN, f"--wlb.policy {best}")]))
        sections.append(section("Policies in turns", "", table(bench_rows(records))))
    if runs:
        steps, (best, answer) = run_steps(runs), _answer(runs)
        title = f"{_listed(run.name for run in runs)}{_corpora(runs)}"
        heads.append((title, answer, waits(steps, best, runs[0].name)))
        if not benches or len(runs) > 1:
            which = "The last step that all traced, or each run's own last"
            sections += time_sections(steps, "measured in traced steps", which)
            file = next(run.folder for run in runs if run.name == best) / CONFIG_FILE
            search = try_next("simulate", [str(file)], "--search")
            sections.append(
                page.next_section([("What other degrees and schedules are worth to it:", search)])
            )
        sections += run_sections(runs)
    title, answer, waiting = heads[0]
    return page.write_page(folder, title=title, answer=answer + waiting, sections=sections)


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _corpora(runs: Sequence[Run]) -> str:
    if any("wlb.corpus.sources.0.path" in run.settings for run in runs):
        return " on a mixture"
    names = {Path(str(run.settings.get("wlb.corpus.path", ""))).name for run in runs} - {""}
    return f" on {_listed(sorted(names))}" if names else ""


def run_sections(runs: Sequence[Run]) -> list[str]:
    by_step = {run.name: run.series("loss") for run in runs}
    losses = [lines("loss, by step", by_step)]
    if len(runs) > 1:
        by_tokens = {run.name: (run.tokens, run.series("loss")[1]) for run in runs}
        losses.insert(0, lines("loss, by tokens", by_tokens))
    return [
        section("What differs", "", table(setting_rows(runs)) or "No setting.") if len(runs) > 1 else "",
        section("Figures", " ".join(remarks(runs)), table(figure_rows(runs))),
        section("Loss", LOSS if len(runs) > 1 else "", *losses),
        section("Validation", "", lines("loss, by step", {run.name: run.validation for run in runs})),
    ]


def _answer(runs: Sequence[Run]) -> tuple[str, str]:
    """The name of the fastest run but the first, and what it gains."""
    first, *others = runs
    rate = first.rate("tokens_per_second")
    gains = {run.name: list(_gains(run, first, runs).items()) for run in others}
    if not others or rate is None:
        return first.name, f"{first.name} trains on {rate.value if rate else 0:,.0f} tokens a second"
    best = max(gains, key=lambda name: gains[name][0][1].value)
    what, ratio = gains[best][0]
    return best, gained(best, ratio, first.name, what)
