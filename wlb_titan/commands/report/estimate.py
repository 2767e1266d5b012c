"""Figures with their scatter, such as `1.05x ±0.04`, and the sentence that a page begins with."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from numpy.typing import NDArray

from wlb_titan.summary import rate_error


class Estimate(NamedTuple):
    """A figure of some steps.

    Attributes:
        value: its.
        error: standard error of it, in its unit; None where too few steps tell.
    """

    value: float
    error: float | None = None

    @classmethod
    def mean(cls, values: NDArray[Any]) -> Estimate:
        """Of one value a step."""
        error = float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
        return cls(float(values.mean()), error)

    @classmethod
    def rate(cls, amounts: NDArray[Any], seconds: NDArray[Any]) -> Estimate:
        """Amounts a second, of one amount and one time a step."""
        value = float(amounts.sum() / seconds.sum())
        return cls(value, value * rate_error(amounts, seconds) if len(seconds) > 1 else None)

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
        """Of a ratio: the end of a sentence on it where it can hardly be told from 1, or else nothing."""
        if self.error is None or abs(self.value - 1) > 2 * self.error:
            return ""
        return f": {'no' if abs(self.value - 1) <= self.error else 'hardly'} more than the scatter"


def gained(best: str, ratio: Estimate, base: str, what: str = "FLOPs") -> str:
    """What the best gains over the baseline, as the begin of a sentence."""
    if best == base:
        return f"Nothing here does more {what} a second than {base}"
    return f"{best} does {ratio.text('.2f', 'x')} the {what} a second of {base}{ratio.scatter}"


def cost(bubble: float | None, imbalance: float | None) -> str:
    """What still takes the most time, as the end of one."""
    if bubble is not None and bubble >= 0.1:
        return f"the bubble of {bubble:.0%} is what costs."
    if imbalance is not None and imbalance >= 1.05:
        return f"the imbalance of {imbalance:.2f} is what costs."
    return "little is left for balance to gain."
