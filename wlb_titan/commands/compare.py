"""`wlb-titan compare`: what runs differ in, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from wlb_titan.commands.charts import Curves, lines, pipeline_charts
from wlb_titan.commands.console import say, show_table, warnings_once
from wlb_titan.commands.options import check_outputs, report_option
from wlb_titan.commands.page import Card, Try, command, cost, gained, section, table, write_page
from wlb_titan.commands.run_folder import CONFIG, Run, differences, open_runs
from wlb_titan.config.values import shown
from wlb_titan.simulator.trace import Span
from wlb_titan.summary import Estimate

NOT_KNOWN = "–"
RATES = {"model_tflops": "FLOPs", "tokens_per_second": "tokens"}


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN [RUN]...")
@report_option
def compare(folders: tuple[Path, ...], report: Path | None) -> None:
    """Put the metrics of training runs side by side; the first is the baseline.

    RUN is a run's dump_folder, of a job that has ended or still runs:

    \b
    wlb-titan compare outputs/cpu_debug outputs/cpu_balanced --report outputs/compare

    First comes what differs in their configurations. The loss is compared after equally many tokens. Times
    leave out what is logged first after each start, which is in it. docs/metrics.md explains the figures.
    """
    check_outputs(report=report)
    runs = open_runs(folders)
    if settings := setting_rows(runs):
        show_table(settings)
    with warnings_once():
        show_table(figure_rows(runs))
        say(*remarks(runs))
        if report is not None:
            click.echo(f"Report: {write_report(report, runs)}")


def setting_rows(runs: Sequence[Run]) -> list[dict[str, str]]:
    """A row for each setting that is not the same in all runs."""
    return [
        {"setting": key}
        | {run.name: NOT_KNOWN if v is None else shown(v) for run, v in zip(runs, values, strict=True)}
        for key, values in differences(runs).items()
    ]


def figure_rows(runs: Sequence[Run]) -> list[dict[str, str]]:
    """A row for each figure; those that no run has are left out."""
    tokens = float(min(run.tokens[-1] for run in runs))  # that all have trained on
    figures: list[tuple[str, str, Callable[[Run], float | Estimate | None]]] = [
        ("steps", ",d", lambda run: run.records[-1]["step"]),
        ("tokens", ",.0f", lambda run: run.tokens[-1]),
        (f"loss after {tokens:,.0f} tokens", ".4f", lambda run: run.loss_at(tokens)),
        ("model TFLOP/s", ",.3g", lambda run: run.rate("model_tflops")),
        ("tokens a second", ",.0f", lambda run: run.rate("tokens_per_second")),
        ("MFU", ".1%", lambda run: getattr(run.rate("mfu_documents"), "value", None)),
        ("imbalance, predicted", ".3f", lambda run: run.mean("imbalance")),
        ("imbalance, measured", ".3f", lambda run: run.mean("measured_imbalance")),
        ("imbalance of context-parallel ranks", ".3f", lambda run: run.mean("imbalance_cp")),
        ("bubble, measured", ".1%", lambda run: run.mean("bubble")),
        ("tokens cut off from their document's start", ".1%", lambda run: run.mean("cut_share")),
        ("keys that a token attends to", ",.0f", lambda run: run.mean("keys_per_token")),
        ("delay, iterations", ".2f", lambda run: run.mean("delay_mean")),
        ("peak memory, GiB", ".2f", lambda run: run.peak_gib),
    ]
    rows = [{"figure": name} | {run.name: _cell(of(run), form) for run in runs} for name, form, of in figures]
    return [row for row in rows if any(row[run.name] != NOT_KNOWN for run in runs)]


def _cell(value: float | Estimate | None, form: str) -> str:
    """A figure; a mean rate with its standard error."""
    if value is None:
        return NOT_KNOWN
    if not isinstance(value, Estimate):
        return format(value, form)
    return format(value.value, form) + ("" if value.relative is None else f" ±{value.relative:.1%}")


def remarks(runs: Sequence[Run]) -> list[str]:
    """What the figures say, in words, and what they cannot say."""
    first, *others = runs
    said = [] if setting_rows(runs) or not others else ["The configurations are the same."]
    for run in others:
        ratios = {what: over(run, first, key) for key, what in RATES.items()}
        parts = [
            f"{ratio.text('.2f', 'x')} the {what}" for what, ratio in ratios.items() if ratio is not None
        ]
        if parts:
            seen = next(ratio for ratio in ratios.values() if ratio is not None).scatter
            said.append(f"{run.name} trains on {' and '.join(parts)} a second of {first.name}{seen}.")
        if (worth := _worth(run, first)) is not None:
            said.append(
                f"With a device for each process, its measured passes are worth {worth.text('.2f', 'x')} the "
                "FLOPs a second."
            )
    corpora = [key for key in differences(runs) if key.startswith("wlb.corpus.") and key != "wlb.corpus.seed"]
    if corpora:
        said.append(f"{', '.join(corpora)} differ: losses say nothing about each other.")
    return said


def over(run: Run, first: Run, key: str) -> Estimate | None:
    """A rate over the first run's; None where one of them has none."""
    mine, base = run.rate(key), first.rate(key)
    return None if mine is None or base is None or not base.value else mine.over(base)


def _worth(run: Run, first: Run) -> Estimate | None:
    """FLOPs a second over the first run's, as the traced steps' passes put together have them; None where a
    run has too few."""
    if len(run.replayed[0]) < 2 or len(first.replayed[0]) < 2:
        return None
    return Estimate.rate(*run.replayed).over(Estimate.rate(*first.replayed))


LOSS = "By tokens is the fair one: steps of policies differ in their tokens. Dots are validation passes."
STEPS = "Delay is what balance costs: documents that wait for a step that can bear them."
PASSES = "Measured passes: a row is a rank. Time is relative to the work of a rank, as documents differ."


def write_report(folder: Path, runs: Sequence[Run]) -> Path:
    """Draws runs side by side."""
    losses = {run.name: (run.tokens, run.series("loss")[1]) for run in runs}
    measured = {run.name: run.series("measured_imbalance") for run in runs}
    validated = {
        run.name: ([one["step"] for one in run.validations], [one["loss"] for one in run.validations])
        for run in runs
    }
    timelines = traced_steps(runs)
    corpora = {Path(str(run.settings.get("wlb.corpus.path", "runs"))).name for run in runs}
    best = max(runs[1:] or runs, key=lambda run: getattr(_gain(run, runs[0])[0], "value", 0.0))
    return write_page(
        folder,
        title=f"{' and '.join(sorted(corpora))}: {len(runs)} runs side by side",
        answer=_answer(best, runs[0]),
        cards=[_card(run, runs[0]) for run in runs],
        tries=_tries(best, runs[0]),
        sections=[
            section("What differs", "", table(setting_rows(runs)) or "No setting."),
            section("Figures", " ".join(remarks(runs)), table(figure_rows(runs))),
            section("A step", PASSES, pipeline_charts(timelines)) if timelines else "",
            section(
                "Loss", LOSS, _lines("by step", runs, "loss", validated), lines("by tokens", "tokens", losses)
            ),
            section(
                "Step by step",
                STEPS,
                _lines("imbalance; dots: measured", runs, "imbalance", measured),
                _lines("tokens a second", runs, "tokens_per_second", zero=True),
                _lines("steps that a step's tokens waited, mean", runs, "delay_mean", zero=True),
                _lines("tokens that wait", runs, "waiting_tokens", zero=True),
            ),
        ],
    )


def _gain(run: Run, first: Run) -> tuple[Estimate | None, str]:
    """FLOPs a second over the first run's; tokens where no FLOPs are known."""
    found = [(ratio, what) for key, what in RATES.items() if (ratio := over(run, first, key)) is not None]
    return found[0] if found else (None, "")


def _answer(run: Run, first: Run) -> str:
    imbalance = run.mean("measured_imbalance")
    still = cost(run.mean("bubble"), run.mean("imbalance") if imbalance is None else imbalance)
    ratio, what = _gain(run, first)
    return (
        f"In {run.name} {still}" if ratio is None else f"{gained(run.name, ratio, first.name, what)}; {still}"
    )


def _card(run: Run, first: Run) -> Card:
    (ratio, what), tokens = _gain(run, first), run.rate("tokens_per_second")
    balance = {
        "measured_imbalance": "imbalance {:.3f} measured",
        "imbalance": "imbalance {:.3f} predicted",
        "bubble": "bubble {:.1%}",
    }
    facts = (
        "the baseline" if run is first else f"the {what} a second of {first.name}",
        *(form.format(mean) for key, form in balance.items() if (mean := run.mean(key)) is not None),
        f"{tokens.text(',.0f')} tokens a second" if tokens is not None else "",
    )
    return Card(run.name, NOT_KNOWN if ratio is None else ratio.text(".2f", "x"), facts)


def _tries(run: Run, first: Run) -> list[Try]:
    file = [str(run.folder / CONFIG)]
    search = command("simulate", file, "--search")
    tries = [Try("What other degrees and schedules are worth to it:", search)]
    ratio, _ = _gain(run, first)
    if ratio is not None and ratio.scatter:
        why = "Four times the steps, which halve the scatter; so for each run, which goes on where it ended:"
        more = command("train", file, "--training.steps", str(4 * int(run.records[-1]["step"])))
        tries.insert(0, Try(why, more))
    return tries


def _lines(
    title: str, runs: Sequence[Run], key: str, dots: Curves | None = None, *, zero: bool = False
) -> str:
    return lines(title, "step", {run.name: run.series(key) for run in runs}, zero=zero, dots=dots)


def traced_steps(runs: Sequence[Run]) -> dict[str, list[Span]]:
    """The last step that all runs traced, or each its own last one; the first data-parallel rank's passes."""
    traced = [run for run in runs if run.traced]
    common = set.intersection(*(set(run.traced) for run in traced)) if traced else set()
    timelines = {}
    for run in traced:
        step = max(common or run.traced)
        if spans := run.trace(step):
            timelines[f"{run.name}, step {step}"] = [s for s in spans if s.process == spans[0].process]
    return timelines
