"""The pictures of `wlb-titan simulate --report`, each as the text of an SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from wlb_titan.commands.plan_figures import INK, STYLE, plt, svg
from wlb_titan.memory.peak import GIB, TERMS
from wlb_titan.policies import Policy
from wlb_titan.simulator.step import Prediction
from wlb_titan.simulator.timeline import MemoryCurve

PARTS = {"busy": "#3b78c2", "waiting": "#d9dce1", "data-parallel communication": "#c99a4b"}
TERM_COLORS = (
    "#3b78c2",
    "#6aa5de",
    "#8a8f98",
    "#c99a4b",
    "#12967f",
    "#9b6b9e",
    "#d9a3c0",
    "#d0605e",
    "#5a7d3c",
)


def step_parts(predictions: Mapping[Policy, Prediction]) -> str:
    """A bar a policy: seconds of a step in which a rank is busy, waits, and communicates at the end."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(10, 0.45 * len(predictions) + 1.1))
        for row, prediction in enumerate(predictions.values()):
            total, busy = prediction.seconds.mean(), prediction.busy.mean()
            communication = prediction.communication.mean()
            parts = (busy, total - busy - communication, communication)
            left = 0.0
            for (name, color), part in zip(PARTS.items(), parts, strict=True):
                axes.barh(row, part, 0.7, left, color=color, label=name if row == 0 else None)
                left += part
        axes.set_yticks(range(len(predictions)), [str(policy) for policy in predictions])
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
        return svg(figure)


def memory_curves(curves: Mapping[str, Sequence[MemoryCurve]]) -> str:
    """Activations of each pipeline rank over a step, a picture for each policy."""
    with plt.rc_context(STYLE):
        figure, rows = plt.subplots(
            len(curves), 1, figsize=(10, 1.6 * len(curves) + 0.5), sharex=True, sharey=True, squeeze=False
        )
        for axes, (name, ranks) in zip(rows[:, 0], curves.items(), strict=True):
            for curve in ranks:
                axes.step(curve.seconds, curve.bytes_ / GIB, where="post", label=f"pp {curve.rank}")
            axes.set_title(name)
            axes.set_ylabel("GiB")
        rows[0, 0].legend(loc="upper right", ncols=4)
        rows[-1, 0].set_xlabel("seconds")
        return svg(figure)


def peak_memory(predictions: Mapping[Policy, Prediction]) -> str:
    """Stacked terms of each pipeline rank's peak."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(10, 3.6))
        labels, base = [], 0
        for policy, prediction in predictions.items():
            places = base + np.arange(len(prediction.memory))
            bottom = np.zeros(len(places))
            for term, color in zip(TERMS, TERM_COLORS, strict=True):
                sizes = np.array([getattr(rank, term) / GIB for rank in prediction.memory])
                label = term.replace("_", " ") if base == 0 else None
                axes.bar(places, sizes, 0.8, bottom, color=color, label=label)
                bottom += sizes
            labels.append((places.mean(), str(policy)))
            base += len(places) + 1
        available = next(iter(predictions.values())).job.cluster.memory / GIB
        axes.axhline(available, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_xticks([place for place, _ in labels], [name for _, name in labels])
        axes.set_ylabel("GiB")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return svg(figure)
