"""The figures of many steps: the paper's Table 2, delay, whole documents, and how much figures scatter."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
        padding, lost: tokens of padding, and tokens left out for good.
        cut: share of the tokens in pieces that start in mid-document, as of `Plan.cut_share`.
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
        steps, workloads = [], []
        longest = tokens = padding = lost = 0
        cut = keys = 0.0
        delays = np.zeros(1, dtype=np.int64)
        gaps = []
        for plan in plans:
            steps.append((plan.imbalance, plan.plan_ms, plan.waiting_tokens))
            workloads.append(sorted((m.workload for m in plan.forward), reverse=True))
            longest = max(longest, plan.longest)
            tokens += plan.tokens
            padding += plan.padding
            lost += plan.lost_tokens
            cut += plan.tokens * plan.cut_share(window)
            keys += plan.tokens * plan.keys_per_token
            if plan.gap is not None:
                gaps.append(plan.gap)
            documents = np.concatenate([m.documents for m in plan.packs])
            step = np.bincount(documents[:, DELAY], documents[:, LENGTH]).astype(np.int64)
            delays = np.pad(delays, (0, max(0, len(step) - len(delays))))
            delays[: len(step)] += step
        imbalance, plan_ms, waiting = np.array(steps, dtype=float).T
        return cls(
            imbalance,
            plan_ms,
            waiting,
            np.array(workloads),
            longest,
            tokens,
            padding,
            lost,
            cut / tokens,
            keys / tokens,
            delays,
            max(gaps, default=None),
        )

    @property
    def delay(self) -> float:
        """Iterations that a token waited on average."""
        return float(np.arange(len(self.delays)) @ self.delays / self.tokens)

    def figures(self) -> dict[str, Any]:
        """The table's row, as plain numbers."""
        return {
            "imbalance_mean": float(self.imbalance.mean()),
            "imbalance_p95": float(np.percentile(self.imbalance, 95)),
            "imbalance_max": float(self.imbalance.max()),
            "delay_mean": self.delay,
            "delay_max": len(self.delays) - 1,
            "padding": self.padding / (self.tokens + self.padding),
            "plan_ms": float(np.median(self.plan_ms)),
            "longest": self.longest,
            "lost_tokens": self.lost,
            "cut_share": self.cut,
            "keys_per_token": self.keys,
            "gap": self.gap,
        }


class Estimate(NamedTuple):
    """A figure of some steps.

    Attributes:
        error: standard error of the value, in its unit; None where too few steps tell.
    """

    value: float
    error: float | None = None

    @classmethod
    def mean(cls, values: NDArray[Any]) -> Estimate:
        """The mean of one value a step."""
        error = float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
        return cls(float(values.mean()), error)

    @classmethod
    def rate(cls, amounts: NDArray[Any], seconds: Floats) -> Estimate:
        """Amounts a second, of one amount and one time a step."""
        value = float(amounts.sum() / seconds.sum())
        if len(seconds) < 2:
            return cls(value)
        deviations = amounts / value - seconds
        return cls(value, value * float(deviations.std(ddof=1) / seconds.mean() / len(seconds) ** 0.5))

    def over(self, base: Estimate) -> Estimate:
        """The ratio; over itself it is 1 and has no error."""
        ratio = self.value / base.value
        if self == base or self.error is None or base.error is None:
            return Estimate(ratio)
        return Estimate(ratio, ratio * math.hypot(self.error / self.value, base.error / base.value))

    @property
    def relative(self) -> float | None:
        """Standard error over the value."""
        return None if self.error is None else self.error / self.value

    def text(self, form: str, unit: str = "") -> str:
        """`1.05x ±0.04` of `.2f` and `x`."""
        return f"{self.value:{form}}{unit}" + ("" if self.error is None else f" ±{self.error:{form}}")

    @property
    def scatter(self) -> str:
        """The end of a sentence about a ratio: whether it can hardly be told from 1, or else nothing."""
        if self.error is None or abs(self.value - 1) > 2 * self.error:
            return ""
        return f": {'no' if abs(self.value - 1) <= self.error else 'hardly'} more than the scatter"
