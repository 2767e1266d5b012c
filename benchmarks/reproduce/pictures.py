"""The drawings of docs/reproduction.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

FOLDER = Path(__file__).parents[2] / "docs" / "reproduction"
GREY, GOLD, BLUE, GREEN, VIOLET, INK = "#8a8f98", "#c99a4b", "#3b78c2", "#12967f", "#8661b5", "#20242b"
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
        settings = list(results["settings"].values())
        one = settings[results["setup"]["one"]]
        _figure_3(results["figure_3"])
        _figure_4(one["large_job"])
        _figure_7(one["figure_7"])
        _figure_10(one["figure_10"])
        _figure_12([setting["figure_12"] for setting in settings])
        _figure_14([setting["figure_14"] for setting in settings])


def _save(figure: Any, name: str) -> None:
    figure.savefig(FOLDER / name, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def _figure_3(figure_3: dict[str, Any]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8))
    counts = np.array(figure_3["histogram"])
    left.bar(range(4, 17), counts / counts.sum(), 0.9, align="edge", color=BLUE)
    left.set_xticks([6, 9, 12, 15, 17], ["64", "512", "4K", "32K", "128K"])
    left.set_xlabel("document length, tokens")
    left.set_ylabel("share of documents")
    profile = np.array(figure_3["carried"]["profile"])
    right.plot((np.arange(len(profile)) + 0.5) * 128 / len(profile), profile / profile.min(), color=GREEN)
    right.set_ylim(0.9)
    right.set_xlabel("position in the window, K tokens")
    right.set_ylabel("average length / least")
    figure.tight_layout()
    _save(figure, "figure_03.svg")


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


def _figure_12(settings: list[dict[str, Any]]) -> None:
    figure, axes = plt.subplots(figsize=(9, 3.2))
    bars = {
        "Fixed-4D": (lambda row: fixed_4d(row), GOLD),
        "WLB-LLM": (lambda row: row["wlb/adaptive"], BLUE),
        "wlb_lazy, hybrid, best order": (lambda row: row["wlb_lazy/hybrid/best"], GREEN),
        "slim, hybrid": (lambda row: row["slim/hybrid"], VIOLET),
    }
    names = list(settings[0])
    for place, (label, (value, color)) in enumerate(bars.items()):
        heights = np.array([[value(setting[name]) - 1 for name in names] for setting in settings])
        middle = heights.mean(axis=0)
        ends = np.abs([heights.min(axis=0) - middle, heights.max(axis=0) - middle])
        x = np.arange(len(names)) + 0.21 * (place - 1.5)
        axes.bar(x, middle, 0.19, bottom=1, color=color, label=label)
        axes.errorbar(x, 1 + middle, ends, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
    axes.axhline(1, color=INK, linewidth=1)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("speedup over Plain-4D")
    axes.set_title("Mean and range of the settings", loc="left")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    _save(figure, "figure_12.svg")


def _figure_14(settings: list[dict[str, Any]]) -> None:
    figure, axes = plt.subplots(figsize=(6, 3))
    windows = list(settings[0])
    for name, key, color in (
        ("WLB-LLM", "wlb/adaptive", BLUE),
        ("wlb_lazy, hybrid, best order", "wlb_lazy/hybrid/best", GREEN),
    ):
        values = np.array([[setting[window][key] for window in windows] for setting in settings])
        axes.plot(windows, values.mean(axis=0), color=color, marker="o", label=name)
        axes.fill_between(
            windows, values.min(axis=0), values.max(axis=0), color=color, alpha=0.15, linewidth=0
        )
    axes.scatter(["128K", "160K"], [1.33, 1.40], color=INK, marker="x", label="paper", zorder=3)
    axes.set_ylabel("speedup over Plain-4D")
    axes.set_xlabel("context window")
    axes.legend()
    _save(figure, "figure_14.svg")


def fixed_4d(row: dict[str, Any]) -> float:
    """The better of the two shardings, as the paper takes it."""
    return max(row["fixed_greedy/per_sequence"], row["fixed_greedy/per_document"])
