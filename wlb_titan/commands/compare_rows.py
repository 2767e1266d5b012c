"""What `wlb-titan compare` says of runs, as rows and in words: on the console and in the report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wlb_titan.commands.run_folder import Run, differences
from wlb_titan.config.values import shown
from wlb_titan.summary import rate_error

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
        ("MFU", [run.per_second("mfu_documents") for run in runs], ".1%"),
        ("imbalance, predicted", [run.mean("imbalance") for run in runs], ".3f"),
        ("imbalance, measured", [run.mean("measured_imbalance") for run in runs], ".3f"),
        ("imbalance of context-parallel ranks", [run.mean("imbalance_cp") for run in runs], ".3f"),
        ("bubble, measured", [run.mean("bubble") for run in runs], ".1%"),
        ("tokens in pieces cut at their begin", [run.mean("cut_share") for run in runs], ".1%"),
        ("keys that a token attends to", [run.mean("keys_per_token") for run in runs], ",.0f"),
        ("delay, iterations", [run.mean("delay_mean") for run in runs], ".2f"),
        ("peak memory, GiB", [max(run.peak_memory().values(), default=None) for run in runs], ".2f"),
    ]
    rates = [
        {"figure": name} | {run.name: _rate(run, key, form) for run in runs}
        for name, key, form in (
            ("model TFLOP/s", "model_tflops", ",.3g"),
            ("tokens a second", "tokens_per_second", ",.0f"),
        )
        if any(run.per_second(key) is not None for run in runs)
    ]
    others = [
        {"figure": name}
        | {
            run.name: NOT_KNOWN if value is None else format(value, form)
            for run, value in zip(runs, values, strict=True)
        }
        for name, values, form in figures
        if any(value is not None for value in values)
    ]
    return [*others[:3], *rates, *others[3:]]


def _rate(run: Run, key: str, form: str) -> str:
    """A mean rate with its standard error."""
    value, error = run.per_second(key), run.error(key)
    if value is None:
        return NOT_KNOWN
    return format(value, form) + (f" ±{error:.1%}" if error is not None else "")


def common_tokens(runs: Sequence[Run]) -> float:
    """The tokens that all runs have trained on."""
    return float(min(run.tokens[-1] for run in runs))


def remarks(runs: Sequence[Run]) -> list[str]:
    """What the figures say, in words, and what they cannot say."""
    first, *others = runs
    said = [] if setting_rows(runs) or not others else ["The configurations are the same."]
    for run in others:
        parts = [
            _ratio(run, first, "model_tflops", "FLOPs"),
            _ratio(run, first, "tokens_per_second", "tokens"),
        ]
        if any(parts):
            said.append(
                f"{run.name} trains on {' and '.join(filter(None, parts))} a second of {first.name}"
                f"{_seen(run, first)}."
            )
        if (worth := _worth(run, first)) is not None:
            said.append(
                f"With a device for each process, its measured passes are worth {worth} the FLOPs a second."
            )
    corpora = {run.settings.get("wlb.corpus.path") for run in runs}
    if len(corpora) > 1:
        said.append("The corpora are not the same: losses say nothing about each other.")
    return said


def _ratio(run: Run, first: Run, key: str, what: str) -> str | None:
    mine, base = run.per_second(key), first.per_second(key)
    if mine is None or not base:
        return None
    error = _error(run, first, key)
    return f"{mine / base:.2f}x" + (f" ±{error:.2f}" if error is not None else "") + f" the {what}"


def _error(run: Run, first: Run, key: str) -> float | None:
    """Standard error of the ratio of two runs' rates."""
    mine, base = run.error(key), first.error(key)
    if mine is None or base is None:
        return None
    return float(run.per_second(key) / first.per_second(key) * math.hypot(mine, base))  # type: ignore[operator]


def _seen(run: Run, first: Run) -> str:
    """Whether a difference in FLOPs a second can be told from none, at two standard errors."""
    key = "model_tflops" if run.per_second("model_tflops") is not None else "tokens_per_second"
    mine, base = run.per_second(key), first.per_second(key)
    if mine is None or not base or (error := _error(run, first, key)) is None:
        return ""
    return "" if abs(mine / base - 1) > 2 * error else ": no difference can be seen in so few steps"


def _worth(run: Run, first: Run) -> str | None:
    """FLOPs a second over the first run's, as the traced steps' passes put together have them, with standard
    error; None where a run has too few."""
    (mine, seconds), (base, others) = run.replayed, first.replayed
    if len(mine) < 2 or len(base) < 2:
        return None
    ratio = (mine.sum() / seconds.sum()) / (base.sum() / others.sum())
    error = ratio * math.hypot(rate_error(mine, seconds), rate_error(base, others))
    return f"{ratio:.2f}x ±{error:.2f}"
