"""The pictures of `wlb-titan plan --report`, each as the text of an SVG."""

from __future__ import annotations

import io
from collections.abc import Mapping

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from wlb_titan.summary import Summary

COLORS = {
    "plain": "#8a8f98",
    "fixed_greedy": "#c99a4b",
    "fixed_solver": "#9b6b9e",
    "wlb": "#3b78c2",
    "wlb_lazy": "#12967f",
    "slim": "#8a5fb0",
}
OTHER_COLORS = ("#b0662b", "#7a5ea8", "#5c8a3a", "#b34d73")


def color_of(policy: str) -> str:
    """The colour of a packing policy; of one that is not known always the same of a few."""
    return COLORS.get(policy) or OTHER_COLORS[sum(policy.encode()) % len(OTHER_COLORS)]


INK = "#20242b"
FAINT = "#d9dce1"
STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "xtick.color": "#5b616b",
    "ytick.color": "#5b616b",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eceef1",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "savefig.transparent": True,
}
STEPS_SHOWN = 60  # of the workloads; more become a blur


def length_histogram(lengths: NDArray[np.int64], window: int) -> str:
    """How many documents there are of each length, and how many of all tokens they hold."""
    top = int(np.ceil(np.log2(max(int(lengths.max()), window)))) + 1
    low = int(np.floor(np.log2(max(int(lengths.min()), 1))))
    bins = 2.0 ** np.arange(low, top + 0.5, 0.5)
    documents = np.histogram(lengths, bins)[0] / len(lengths)
    tokens = np.histogram(lengths, bins, weights=lengths)[0] / lengths.sum()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(10, 3.4))
        for share, color, label in (
            (documents, "#b9bec7", "of all documents"),
            (tokens, COLORS["wlb_lazy"], "of all tokens"),
        ):
            axes.stairs(share * 100, bins, fill=True, color=color, alpha=0.55, label=label)
            axes.stairs(share * 100, bins, color=color, linewidth=1.6)
        axes.axvline(window, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.text(window, axes.get_ylim()[1], "context window ", ha="right", va="top", fontsize=9, color=INK)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        axes.set_xlim(bins[0], bins[-1])
        axes.set_xlabel("document length, tokens")
        axes.set_ylabel("%")
        axes.legend(loc="upper left")
        return svg(figure)


def workloads(summaries: Mapping[str, Summary]) -> str:
    """Every micro-batch's work, step by step, policy over policy, on one scale."""
    mean = np.mean([summary.workloads.mean() for summary in summaries.values()])
    highest = max(float(summary.workloads[:STEPS_SHOWN].max()) for summary in summaries.values()) / mean
    with plt.rc_context(STYLE):
        figure, rows = plt.subplots(
            len(summaries),
            1,
            figsize=(10, 1.75 * len(summaries) + 0.5),
            sharex=True,
            sharey=True,
            squeeze=False,
        )
        for axes, (name, summary) in zip(rows[:, 0], summaries.items(), strict=True):
            _work_of_steps(axes, summary.workloads[:STEPS_SHOWN] / mean, color_of(name))
            axes.set_title(name)
            axes.set_ylim(0, highest * 1.06)
        rows[-1, 0].set_xlabel("step")
        figure.supylabel("work of a micro-batch / mean", fontsize=10)
        return svg(figure)


def _work_of_steps(axes: Axes, work: NDArray[np.float64], color: str) -> None:
    """What each step computes, and above it what it waits: the gap between the mean and the largest."""
    steps = np.arange(len(work))
    mean, most = work.mean(axis=1), work.max(axis=1)
    axes.bar(steps, mean, width=0.82, color=color, alpha=0.28, linewidth=0)
    axes.bar(steps, most - mean, bottom=mean, width=0.82, color="#d6453d", alpha=0.5, linewidth=0)
    shown = work if work.shape[1] <= 16 else np.quantile(work, np.linspace(0, 1, 17), axis=1).T
    size = 9 if work.shape[1] <= 16 else 4
    axes.scatter(np.repeat(steps, shown.shape[1]), shown.ravel(), s=size, color=color, linewidths=0)
    axes.set_xlim(-0.8, len(work) - 0.2)
    axes.grid(axis="x", visible=False)


def imbalance(summaries: Mapping[str, Summary]) -> str:
    """The imbalance degree over steps, and how it is distributed."""
    with plt.rc_context(STYLE):
        figure, (over, sorted_) = plt.subplots(
            1, 2, figsize=(10, 3.4), gridspec_kw={"width_ratios": [2, 1]}, sharey=True
        )
        for name, summary in summaries.items():
            color = color_of(name)
            _line(over, summary.imbalance, color, name)
            share = np.linspace(0, 100, len(summary.imbalance))
            sorted_.plot(share, np.sort(summary.imbalance), color=color, linewidth=2)
        over.set_title("step by step, and moving average")
        over.set_xlabel("step")
        over.set_ylabel("largest / mean work")
        sorted_.set_title("sorted")
        sorted_.set_xlabel("% of steps")
        sorted_.axvline(95, color=FAINT, linewidth=1)
        figure.legend(*over.get_legend_handles_labels(), loc="outside upper right", ncols=len(summaries))
        return svg(figure)


def delay(summaries: Mapping[str, Summary], batch_tokens: int) -> str:
    """What waits after each step, and how long tokens have waited when they are trained."""
    with plt.rc_context(STYLE):
        figure, (queue, waits) = plt.subplots(1, 2, figsize=(10, 3.4), gridspec_kw={"width_ratios": [2, 1]})
        shown = {name: summary for name, summary in summaries.items() if summary.waiting.any()}
        for name, summary in shown.items():
            depth = summary.waiting / batch_tokens
            _line(queue, depth, color_of(name), name)
            later = 100 * (1 - np.cumsum(summary.delays) / summary.tokens)
            waits.step(np.arange(len(later)), later, where="post", color=color_of(name), linewidth=2)
        queue.set_title("tokens that wait, in global batches")
        queue.set_xlabel("step")
        queue.set_ylim(bottom=0)
        waits.set_title("tokens that waited longer, %")
        waits.set_xlabel("iterations")
        waits.set_ylim(bottom=0)
        if shown:
            figure.legend(*queue.get_legend_handles_labels(), loc="outside upper right", ncols=len(shown))
        else:
            queue.text(0.5, 0.5, "nothing waits", transform=queue.transAxes, ha="center", color="#5b616b")
        return svg(figure)


def _line(axes: Axes, values: NDArray[np.float64], color: str, label: str) -> None:
    """The values of all steps, and over them their moving average where they are many."""
    span = max(len(values) // 20, 1)
    if span == 1:
        axes.plot(values, color=color, linewidth=1.6, label=label)
        return
    axes.plot(values, color=color, linewidth=0.6, alpha=0.35)
    smooth = np.convolve(values, np.full(span, 1 / span), "valid")
    axes.plot(np.arange(len(smooth)) + (span - 1) / 2, smooth, color=color, linewidth=2.2, label=label)


def short(value: float) -> str:
    """131072 -> 128K."""
    for unit in ("", "K", "M"):
        if value < 1024:
            return f"{value:g}{unit}"
        value /= 1024
    return f"{value:g}G"


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element; closes it."""
    figure.set_layout_engine("constrained")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]
