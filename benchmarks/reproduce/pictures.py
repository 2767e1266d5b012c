"""The drawings of docs/reproduction.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

FOLDER = Path(__file__).parents[2] / "docs" / "reproduction"
GREY, GOLD, BLUE, GREEN, INK = "#8a8f98", "#c99a4b", "#3b78c2", "#12967f", "#20242b"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eceef1",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "wlb_titan",
}


def draw_all(results: dict[str, Any]) -> None:
    """Writes FOLDER/*.svg."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        _figure_4(results["large_job"])
        _figure_7(results["figure_7"])
        _figure_10(results["figure_10"])
        _figure_12(results["figure_12"])
        _figure_14(results["figure_14"])


def _save(figure: Any, name: str) -> None:
    figure.savefig(FOLDER / name, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def _figure_4(job: dict[str, Any]) -> None:
    attention = np.array(job["attention"])
    attention = attention / attention.mean()
    figure, axes = plt.subplots(figsize=(8, 2.6))
    for replica, ranks in enumerate(attention):
        axes.scatter(replica * 20 + np.arange(len(ranks)), ranks, s=14, color=BLUE)
    axes.set_xticks([replica * 20 + 7.5 for replica in range(len(attention))])
    axes.set_xticklabels([f"DP {replica}" for replica in range(len(attention))])
    axes.set_ylabel("attention / mean")
    axes.set_title("Attention of every CP rank over one step (TP 8, CP 16, PP 16, DP 4)", loc="left")
    _save(figure, "figure_04.svg")


def _figure_7(figure_7: dict[str, Any]) -> None:
    figure, axes = plt.subplots(figsize=(6, 3))
    axes.plot(figure_7["tokens"], figure_7["attention"], color=BLUE, marker="o", label="attention")
    axes.plot(figure_7["tokens"], figure_7["linear"], color=GOLD, marker="o", label="everything else")
    axes.set_xlabel("document length, tokens")
    axes.set_ylabel("forward, seconds")
    axes.legend()
    _save(figure, "figure_07.svg")


def _figure_10(figure_10: dict[str, Any]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8))
    left.plot(figure_10["q_len"], np.array(figure_10["seconds"]) * 1e3, color=BLUE, marker="o")
    left.set_ylim(0)
    left.set_ylabel("forward, ms")
    right.plot(figure_10["q_len"], figure_10["tflops"], color=GREEN, marker="o")
    right.set_ylim(0)
    right.set_ylabel("achieved TFLOP/s")
    for axes in (left, right):
        axes.set_xlabel("query tokens of a segment")
    figure.tight_layout()
    _save(figure, "figure_10.svg")


def _figure_12(figure_12: dict[str, Any]) -> None:
    figure, axes = plt.subplots(figsize=(9, 3.2))
    bars = {
        "Fixed-4D": (lambda row: fixed_4d(row), GOLD),
        "WLB-LLM": (lambda row: row["wlb:adaptive"], BLUE),
        "wlb_lazy, hybrid, best order": (lambda row: row["wlb_lazy:hybrid:best"], GREEN),
    }
    for place, (name, (value, color)) in enumerate(bars.items()):
        heights = [value(row) - 1 for row in figure_12.values()]
        axes.bar(
            np.arange(len(heights)) + 0.27 * (place - 1), heights, 0.25, bottom=1, color=color, label=name
        )
    axes.axhline(1, color=INK, linewidth=1)
    axes.set_xticks(range(len(figure_12)), list(figure_12))
    axes.set_ylabel("speedup over Plain-4D")
    axes.legend(ncols=3, loc="upper right")
    _save(figure, "figure_12.svg")


def _figure_14(figure_14: dict[str, Any]) -> None:
    figure, axes = plt.subplots(figsize=(6, 3))
    for name, key, color in (
        ("WLB-LLM", "wlb:adaptive", BLUE),
        ("wlb_lazy, hybrid", "wlb_lazy:hybrid", GREEN),
    ):
        axes.plot(
            list(figure_14), [row[key] for row in figure_14.values()], color=color, marker="o", label=name
        )
    axes.scatter(["128K", "160K"], [1.33, 1.40], color=INK, marker="x", label="paper", zorder=3)
    axes.set_ylabel("speedup over Plain-4D")
    axes.set_xlabel("context window")
    axes.legend()
    _save(figure, "figure_14.svg")


def fixed_4d(row: dict[str, Any]) -> float:
    """The better of the two shardings, as the paper takes it."""
    return max(row["fixed_greedy:per_sequence"], row["fixed_greedy:per_document"])
