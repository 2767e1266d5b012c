"""The figures of many steps: the paper's Table 2, delay, whole documents, scatter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats, Ints
from wlb_titan.plan import DELAY, LENGTH, Plan


@dataclass(frozen=True, slots=True)
class Summary:
    """Steps of one packing policy, of which no document is kept.

    Attributes:
        imbalance: float64 (steps,), imbalance degree of each step.
        plan_ms: float64 (steps,), milliseconds of planning.
        waiting: float64 (steps,), tokens that waited after each step.
        workloads: float64 (steps, N), work of the micro-batches of each step, descending.
        longest: tokens of the longest micro-batch, padding included.
        tokens: tokens of all documents.
        padding: tokens of padding.
        lost: tokens left out for good.
        cut: share of the tokens in pieces that begin in mid-document, as of `Plan.cut_share`.
        keys: keys that a token attends to, averaged over all tokens.
        delays: int64 (longest delay + 1,), tokens by the iterations that they waited.
        gap: largest gap of a solver's packing; None without a solver.
    """

    imbalance: Floats
    plan_ms: Floats
    waiting: Floats
    workloads: Floats
    longest: int
    tokens: int
    padding: int
    lost: int
    cut: float
    keys: float
    delays: Ints
    gap: float | None

    @classmethod
    def of(cls, plans: Iterable[Plan], window: int) -> Summary:
        """Reads the plans one by one; at least one."""
        imbalance, plan_ms, waiting, workloads = [], [], [], []
        longest = tokens = padding = lost = 0
        cut = keys = 0.0
        delays = np.zeros(1, dtype=np.int64)
        gap: float | None = None
        for plan in plans:
            imbalance.append(plan.imbalance)
            plan_ms.append(plan.plan_ms)
            waiting.append(float(plan.waiting_tokens))
            workloads.append(sorted((m.workload for m in plan.micro_batches), reverse=True))
            longest = max(longest, plan.longest)
            tokens += plan.tokens
            padding += plan.padding
            lost += plan.lost_tokens
            cut += plan.tokens * plan.cut_share(window)
            keys += plan.tokens * plan.keys_per_token
            if plan.gap is not None:
                gap = max(plan.gap, gap or 0.0)
            documents = np.concatenate([m.documents for m in plan.packs])
            step = np.bincount(documents[:, DELAY], documents[:, LENGTH]).astype(np.int64)
            delays = np.pad(delays, (0, max(0, len(step) - len(delays))))
            delays[: len(step)] += step
        return cls(
            np.array(imbalance),
            np.array(plan_ms),
            np.array(waiting),
            np.array(workloads),
            longest,
            tokens,
            padding,
            lost,
            cut / tokens,
            keys / tokens,
            delays,
            gap,
        )

    @property
    def delay(self) -> float:
        """Iterations that a token waited on average."""
        return float(np.arange(len(self.delays)) @ self.delays / self.tokens)

    @property
    def max_delay(self) -> int:
        return len(self.delays) - 1

    def figures(self) -> dict[str, Any]:
        """The table's row, as plain numbers."""
        return {
            "imbalance_mean": float(self.imbalance.mean()),
            "imbalance_p95": float(np.percentile(self.imbalance, 95)),
            "imbalance_max": float(self.imbalance.max()),
            "delay_mean": self.delay,
            "delay_max": self.max_delay,
            "padding": self.padding / (self.tokens + self.padding),
            "plan_ms": float(np.median(self.plan_ms)),
            "longest": self.longest,
            "lost_tokens": self.lost,
            "cut_share": self.cut,
            "keys_per_token": self.keys,
            "gap": self.gap,
        }


def rate_error(amounts: NDArray[Any], seconds: Floats) -> float:
    """Standard error of sum(amounts) / sum(seconds), over its value, as far as two or more steps tell."""
    deviations = amounts * (seconds.sum() / amounts.sum()) - seconds
    return float(deviations.std(ddof=1) / seconds.mean() / len(seconds) ** 0.5)
