"""What `wlb-titan compare` says of runs, as rows and in words: on the console and in the report."""

from __future__ import annotations

from collections.abc import Sequence

from wlb_titan.commands.run_folder import Run, differences
from wlb_titan.config.values import shown

NOT_KNOWN = "–"


def setting_rows(runs: Sequence[Run]) -> list[dict[str, str]]:
    """A row for each setting that is not the same in all runs."""
    return [
        {"setting": key}
        | {run.name: NOT_KNOWN if v is None else shown(v) for run, v in zip(runs, values, strict=True)}
        for key, values in differences(runs).items()
    ]


def figure_rows(runs: Sequence[Run]) -> list[dict[str, str]]:
    """A row for each figure; those that no run has are left out."""
    tokens = common_tokens(runs)
    figures: list[tuple[str, list[float | None], str]] = [
        ("steps", [run.records[-1]["step"] for run in runs], ",d"),
        ("tokens", [run.tokens[-1] for run in runs], ",.0f"),
        (f"loss after {tokens:,.0f} tokens", [run.loss_at(tokens) for run in runs], ".4f"),
        ("tokens a second", [run.per_second("tokens_per_second") for run in runs], ",.0f"),
        ("model TFLOP/s", [run.per_second("model_tflops") for run in runs], ",.3g"),
        ("MFU", [run.per_second("mfu_documents") for run in runs], ".1%"),
        ("imbalance, predicted", [run.mean("imbalance") for run in runs], ".3f"),
        ("imbalance, measured", [run.mean("measured_imbalance") for run in runs], ".3f"),
        ("imbalance of context-parallel ranks", [run.mean("imbalance_cp") for run in runs], ".3f"),
        ("bubble, measured", [run.mean("bubble") for run in runs], ".1%"),
        ("delay, iterations", [run.mean("delay_mean") for run in runs], ".2f"),
        ("peak memory, GiB", [max(run.peak_memory().values(), default=None) for run in runs], ".2f"),
    ]
    return [
        {"figure": name}
        | {
            run.name: NOT_KNOWN if value is None else format(value, form)
            for run, value in zip(runs, values, strict=True)
        }
        for name, values, form in figures
        if any(value is not None for value in values)
    ]


def common_tokens(runs: Sequence[Run]) -> float:
    """The tokens that all runs have trained on."""
    return float(min(run.tokens[-1] for run in runs))


def remarks(runs: Sequence[Run]) -> list[str]:
    """What the figures say, in words, and what they cannot say."""
    first, *others = runs
    said = [] if setting_rows(runs) or not others else ["The configurations are the same."]
    for run in others:
        parts = [
            _ratio(run, first, "tokens_per_second", "tokens"),
            _ratio(run, first, "model_tflops", "FLOPs"),
        ]
        if any(parts):
            said.append(f"{run.name} trains on {' and '.join(filter(None, parts))} a second of {first.name}.")
    corpora = {run.settings.get("wlb.corpus.path") for run in runs}
    if len(corpora) > 1:
        said.append("The corpora are not the same: losses say nothing about each other.")
    return said


def _ratio(run: Run, first: Run, key: str, what: str) -> str | None:
    mine, base = run.per_second(key), first.per_second(key)
    return f"{mine / base:.2f}x the {what}" if mine is not None and base else None
