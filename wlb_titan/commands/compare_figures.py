"""The pictures of `wlb-titan compare --report`, each as the text of an SVG."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from wlb_titan.commands.plan_figures import STYLE, plt, svg
from wlb_titan.commands.run_folder import Floats, Run

PALETTE = ("#8a8f98", "#12967f", "#3b78c2", "#c99a4b", "#9b6b9e", "#d0605e", "#5b616b", "#7fb069")


def color(number: int) -> str:
    """Of the run that is listed there; the first, the baseline, is grey."""
    return PALETTE[number % len(PALETTE)]


def loss(runs: Sequence[Run]) -> str:
    """By step and by tokens; dots are validation passes."""
    with plt.rc_context(STYLE):
        figure, (by_step, by_tokens) = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
        for number, run in enumerate(runs):
            steps, values = run.series("loss")
            by_step.plot(steps, values, color=color(number), linewidth=1.8, label=run.name)
            by_tokens.plot(run.tokens, values, color=color(number), linewidth=1.8)
            if run.validations:
                passes = np.array([v["step"] for v in run.validations])
                losses = [v["loss"] for v in run.validations]
                by_step.scatter(passes, losses, color=color(number), s=16)
                by_tokens.scatter(np.interp(passes, steps, run.tokens), losses, color=color(number), s=16)
        by_step.set_title("loss by step")
        by_step.set_xlabel("step")
        by_tokens.set_title("loss by tokens")
        by_tokens.set_xlabel("tokens")
        by_tokens.xaxis.set_major_formatter(lambda value, _: _thousands(value))
        return _with_legend(figure, by_step)


def speed(runs: Sequence[Run]) -> str:
    """Tokens a second, step by step and sorted."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(10, 3.2))
        for number, run in enumerate(runs):
            steps, values = run.series("tokens_per_second")
            axes.plot(steps, values, color=color(number), linewidth=1.8, label=run.name)
            mean = run.per_second("tokens_per_second")
            axes.axhline(mean, color=color(number), linewidth=1, linestyle=(0, (4, 3)))
        axes.set_title("tokens a second; dashed: mean without the first logged step")
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
        return _with_legend(figure, axes)


def balance(runs: Sequence[Run]) -> str:
    """Imbalance predicted and measured, and the pipeline's bubble where a step was traced."""
    with plt.rc_context(STYLE):
        figure, (imbalance, bubble) = plt.subplots(1, 2, figsize=(10, 3.6))
        for number, run in enumerate(runs):
            imbalance.plot(*run.series("imbalance"), color=color(number), linewidth=1.8, label=run.name)
            imbalance.scatter(*run.series("measured_imbalance"), color=color(number), s=18, zorder=3)
            steps, shares = run.series("bubble")
            _dots(bubble, steps, 100 * shares, color(number))
        imbalance.set_title("imbalance; dots: measured")
        imbalance.set_xlabel("step")
        imbalance.set_ylabel("largest / mean micro-batch")
        bubble.set_title("bubble, measured, %")
        bubble.set_xlabel("step")
        bubble.set_ylim(bottom=0)
        if not bubble.has_data():
            bubble.text(0.5, 0.5, "no pipeline step was traced", transform=bubble.transAxes, ha="center")
        return _with_legend(figure, imbalance)


def delay(runs: Sequence[Run]) -> str:
    """How long tokens waited, and how many still wait."""
    with plt.rc_context(STYLE):
        figure, (delays, waiting) = plt.subplots(1, 2, figsize=(10, 3.2))
        for number, run in enumerate(runs):
            delays.plot(*run.series("delay_mean"), color=color(number), linewidth=1.8, label=run.name)
            waiting.plot(*run.series("waiting_tokens"), color=color(number), linewidth=1.8)
        delays.set_title("delay of a step's tokens, in iterations")
        waiting.set_title("tokens that wait")
        waiting.yaxis.set_major_formatter(lambda value, _: _thousands(value))
        for axes in (delays, waiting):
            axes.set_xlabel("step")
            axes.set_ylim(bottom=0)
        return _with_legend(figure, delays)


def memory(runs: Sequence[Run]) -> str:
    """Peak of each pipeline stage, a bar a run."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(10, 3.0))
        stages = list(dict.fromkeys(stage for run in runs for stage in run.peak_memory()))
        width = 0.8 / len(runs)
        for number, run in enumerate(runs):
            peaks = [run.peak_memory().get(stage, 0.0) for stage in stages]
            places = np.arange(len(stages)) + (number - (len(runs) - 1) / 2) * width
            axes.bar(places, peaks, 0.92 * width, color=color(number), label=run.name)
        axes.set_xticks(range(len(stages)), stages)
        axes.set_title("peak memory, GiB")
        axes.grid(axis="x", visible=False)
        return _with_legend(figure, axes)


def _dots(axes: Axes, steps: Floats, values: Floats, color_: str) -> None:
    if len(steps):
        axes.plot(steps, values, color=color_, linewidth=1.2, marker="o", markersize=4)


def _with_legend(figure: Figure, axes: Axes) -> str:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=min(len(labels), 4))
    return svg(figure)


def _thousands(value: float) -> str:
    """1500000 -> 1.5M."""
    for unit in ("", "k", "M", "G"):
        if abs(value) < 1000:
            return f"{value:g}{unit}"
        value /= 1000
    return f"{value:g}T"
