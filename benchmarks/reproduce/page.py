"""docs/reproduction.md: page.md.in, with the papers' figures and ours (ranges over settings) in its gaps."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from common import formatted, table
from reproduce.pictures import fixed_4d

HERE = Path(__file__).parent
STATED = tomllib.loads((HERE / "stated.toml").read_text(encoding="utf-8"))
"""What the papers state that stands beside ours: `text`, `value` and `calibrates`, by the keys of `OURS`."""
PAGE = Path(__file__).parents[2] / "docs" / "reproduction.md"
WLB, LAZY, BEST, SLIM = "wlb/adaptive", "wlb_lazy/hybrid", "wlb_lazy/hybrid/best", "slim/hybrid"
Results = dict[str, Any]
Value = Callable[[dict[str, Any]], Any]


def write_page(results: Results) -> Path:
    """Writes the page from the results of run.py; its path."""
    settings = list(results["settings"].values())
    setup, of_figure_6 = results["setup"], results["figure_6"]
    kernel = settings[setup["one"]]["figure_10"]
    gaps = {
        "steps": setup["steps"],
        "count": len(settings),
        "one": list(results["settings"])[setup["one"]],
        "settings": settings_table(results["settings"]),
        "overview": overview(settings),
        "median": setup["lengths"]["median"],
        "sigma": setup["lengths"]["sigma"],
        "figure_3": figure_3(results["figure_3"]),
        "table_2": table_2(settings),
        "figure_12": figure_12(settings),
        "other_lengths": other_lengths(results["other_lengths"]),
        "figure_14": figure_14(settings),
        "figure_15": figure_15(settings),
        "large_job": large_job(settings),
        "figure_6": ", ".join(
            f"{value:.2f} ({window})"
            for window, value in zip(of_figure_6["window"], of_figure_6["imbalance"], strict=True)
        ),
        "loss_of": results["loss_curves"]["settings"],
        "loss": loss(results["loss_curves"]["validation"]),
        "crossing": span(settings, lambda s: s["figure_7"]["equal_at"]),
        "ms": dict(zip(kernel["q_len"], np.array(kernel["seconds"]) * 1e3, strict=True)),
        "rates": dict(zip(kernel["q_len"], kernel["tflops"], strict=True)),
        "scale": scale(results["scale"]),
    }
    template = (HERE / "page.md.in").read_text(encoding="utf-8")
    PAGE.write_text(template.format_map(gaps), encoding="utf-8")
    return PAGE


def span(settings: list[dict[str, Any]], value: Value) -> tuple[float, float]:
    """The least and the most over all settings."""
    values = np.concatenate([np.ravel(value(setting)) for setting in settings])
    return values.min().item(), values.max().item()


def to(low: float, high: float, form: str = ".2f") -> str:
    """A range as text; one figure where its ends look alike."""
    ends = format(low, form), format(high, form)
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def deviation(low: float, high: float, theirs: float) -> str:
    """Of the nearer end over theirs, less 1; "within" where theirs lies between, to two digits."""
    if round(low, 2) <= theirs <= round(high, 2):
        return "within"
    return f"{(low if low > theirs else high) / theirs - 1:+.0%}"


def mean(figure: dict[str, Any], key: str | None, window: str = "") -> float:
    """Mean speedup over the configurations whose name ends with `window`; None is Fixed-4D."""
    rows = [row for name, row in figure.items() if name.endswith(window)]
    return float(np.mean([fixed_4d(row) if key is None else row[key] for row in rows]))


OURS: dict[str, Value] = {
    "step_share": lambda s: s["figure_13"][f"{WLB} step_seconds"],
    "original_imbalance": lambda s: s["table_2"][0]["imbalance"],
    "wlb_mean": lambda s: mean(s["figure_12"], WLB),
    "wlb_64k": lambda s: mean(s["figure_12"], WLB, "-64K"),
    "wlb_128k": lambda s: mean(s["figure_12"], WLB, "-128K"),
    "fixed_mean": lambda s: mean(s["figure_12"], None),
    "wlb_over_fixed": lambda s: mean(s["figure_12"], WLB) / mean(s["figure_12"], None),
    "breakdown_per_document": lambda s: s["figure_13"]["plain/per_document"],
    "breakdown_adaptive": lambda s: s["figure_13"]["plain/adaptive"],
    "breakdown_packing": lambda s: s["figure_13"]["wlb/per_sequence"],
    "breakdown_both": lambda s: s["figure_13"][WLB],
    "window_160k": lambda s: s["figure_14"]["160K"][WLB],
    "large_job_slowest": lambda s: [
        s["large_job"][key] for key in ("slowest_gpu_attention_of_all_steps", "slowest_gpu_attention")
    ],
    "layer_64k": lambda s: s["figure_15"]["64K"]["per_document"],
    "layer_128k": lambda s: s["figure_15"]["128K"]["per_document"],
    "layer_adaptive_over_sequence": lambda s: s["figure_15"]["128K"]["adaptive"],
    "layer_adaptive_over_document": lambda s: s["figure_15"]["128K"]["adaptive_over_per_document"],
    "delay": lambda s: s["delay"],
}
"""Our figure under one setting; a list where it is a range."""


def settings_table(settings: dict[str, Any]) -> str:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "matrices, TFLOP/s": lambda s: f"{s['setting']['linear_flops'] / 1e12:.0f}",
        "attention, times FA": lambda s: f"{s['setting']['slowdown']:.2f}",
        "step, s": lambda s: f"{OURS['step_share'](s):.2f}",
        "imbalance": lambda s: f"{OURS['original_imbalance'](s):.2f}",
        "mean of Figure 12": lambda s: f"{OURS['wlb_mean'](s):.3f}",
        "7B-128K": lambda s: f"{OURS['breakdown_both'](s):.3f}",
    }
    rows = ([name, *(cell(found) for cell in columns.values())] for name, found in settings.items())
    return table(["setting (v: stages a rank)", *columns], rows)


def overview(settings: list[dict[str, Any]]) -> str:
    rows = []
    for key, value in OURS.items():
        stated, theirs = STATED[key], STATED[key]["value"]
        low, high = span(settings, value)
        form = ".3f" if round(theirs, 2) != theirs else ".2f"
        used = " (calibrates)" if stated.get("calibrates") else ""
        ours = to(low, high, form)
        rows.append([stated["text"] + used, format(theirs, form), ours, deviation(low, high, theirs)])
    return table(["figure", "paper", "ours", "deviation"], rows)


def figure_3(found: dict[str, Any]) -> str:
    lines = (
        ("average length by position, largest over least", "1.4", "position_ratio", ".2f", ".1f"),
        ("its peak, from 0 at the beginning to 1", "the middle", "position_peak", ".2f", ".2f"),
        ("tokens in documents below half a window", "above 75 %", "below_half", ".0%", ".0%"),
        ("tokens in documents of a full window", "some", "full_windows", ".1%", ".1%"),
    )
    rows = (
        [text, paper, format(found["carried"][key], ours), format(found["dropped"][key], lost)]
        for text, paper, key, ours, lost in lines
    )
    return table(["128K windows", "paper", "ours", "were the rest lost"], rows)


def table_2(settings: list[dict[str, Any]]) -> str:
    rows = []
    for row, *others in zip(*(setting["table_2"] for setting in settings), strict=True):
        column = {key: span([row, *others], lambda r, k=key: r[k]) for key in ("imbalance", "ms", "delay")}
        given = row["theirs"] is not None
        rows.append(
            [
                row["method"],
                f"{row['theirs']:.2f}" if given else "",
                to(*column["imbalance"]),
                deviation(*column["imbalance"], row["theirs"]) if given else "",
                f"{row['their_ms']:,}" if given else "",
                to(*column["ms"], ".0f"),
                to(*column["delay"]),
            ]
        )
    return table(["method", "paper", "ours", "deviation", "paper, ms", "ours, ms", "delay"], rows)


def figure_12(settings: list[dict[str, Any]]) -> str:
    columns: dict[str, Value] = {
        "Plain-4D, s": lambda row: row["plain"]["step_seconds"],
        "Fixed-4D": fixed_4d,
        "WLB-LLM": lambda row: row[WLB],
        "wlb_lazy, hybrid": lambda row: row[LAZY],
        "and best order": lambda row: row[BEST],
        "slim, hybrid": lambda row: row[SLIM],
    }
    figures = [setting["figure_12"] for setting in settings]
    rows = by_name(figures, columns.values())
    means = (span(figures, lambda f, k=key: mean(f, k)) for key in (None, WLB, LAZY, BEST, SLIM))
    rows.append(["**mean**", "", *(f"**{to(*ends)}**" for ends in means)])
    rows.append(["paper", "", "1.03", "1.23", "", "", ""])
    return table(["", *columns], rows)


def by_name(figures: list[dict[str, Any]], values: Iterable[Value], form: str = ".2f") -> list[list[str]]:
    """A row for each name in a figure, with the ranges of its values."""
    columns = list(values)
    rows = []
    for name in figures[0]:
        own = [figure[name] for figure in figures]
        rows.append([name, *(to(*span(own, value), form) for value in columns)])
    return rows


def other_lengths(found: dict[str, Any]) -> str:
    rows = (
        [f"`{name}`", f"{row['long']:.0%}", *(f"{row[key]:.2f}" for key in (WLB, BEST, SLIM))]
        for name, row in found.items()
    )
    heads = ("tokens in documents of 64K and more", "WLB-LLM", "wlb_lazy, hybrid, best", "slim, hybrid")
    return table(["lengths", *heads], rows)


def figure_14(settings: list[dict[str, Any]]) -> str:
    values = (fixed_4d, lambda row: row[WLB], lambda row: row[BEST])
    rows = by_name([setting["figure_14"] for setting in settings], values)
    return table(["window", "Fixed-4D", "WLB-LLM", "wlb_lazy, hybrid, best"], rows)


def figure_15(settings: list[dict[str, Any]]) -> str:
    figures = [setting["figure_15"] for setting in settings]
    keys = ("per_document", "adaptive", "adaptive_over_per_document")
    rows = by_name(figures, (lambda row, k=key: row[k] for key in keys), ".3f")
    for row in rows:
        ends = span(figures, lambda figure, name=row[0]: figure[name]["per_sequence_is_faster"])
        row.append(" to ".join(f"{end:.0%}" for end in ends))
    heads = ("per-document", "adaptive", "adaptive over per-document", "per-sequence is faster")
    return table(["window", *heads], rows)


def large_job(settings: list[dict[str, Any]]) -> str:
    steps = settings[0]["large_job"]["steps"]
    lines = {
        "attention of the slowest GPU (paper: 1.44, accumulated)": "slowest_gpu_attention",
        f"the same in the sum of {steps} steps": "slowest_gpu_attention_of_all_steps",
        "all computation of the slowest GPU": "slowest_gpu_computation",
        "attention of the slowest replica": "data_parallel_attention",
        "attention of a replica's slowest context-parallel rank, over the mean": "context_parallel_attention",
    }
    rows = ([text, to(*span(settings, lambda s, k=key: s["large_job"][k]))] for text, key in lines.items())
    return table(["over the others", "times as long"], rows)


def loss(validation: dict[str, Any]) -> str:
    columns = {
        "policy": "{policy}",
        "validation loss": "{mean:.4f}",
        "minus plain": "{minus_plain:+.4f}",
        "standard error of the difference": "{standard_error:.4f}",
    }
    return formatted(columns, ({"policy": policy, **row} for policy, row in validation.items()))


def scale(found: list[dict[str, Any]]) -> str:
    columns = {
        "GPUs": "{gpus:,}",
        "N": "{micro_batches:,}",
        "policy": "{policy}",
        "speedup": "{speedup:.3f}",
        "step, s": "{step_seconds:.1f}",
        "planning, s": "{planning_seconds:.2f}",
        "plan, MiB": "{plan_mib:.1f}",
        "simulating, s": "{simulating_seconds:.2f}",
    }
    policies = ("fixed_greedy/per_document", WLB, LAZY)
    return formatted(columns, ({**row, "policy": one, **row[one]} for row in found for one in policies))
