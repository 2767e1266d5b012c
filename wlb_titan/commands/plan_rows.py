"""What `wlb-titan plan` says of a policy, as a row: on the console and in the report."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wlb_titan.summary import Summary

FEW_STEPS = 100  # fewer carry their standard error


def plus_minus(values: NDArray[np.float64]) -> str:
    """The standard error of a mean, where it is of few steps and would show: ` ±0.012`."""
    if not 1 < len(values) < FEW_STEPS:
        return ""
    return f" ±{values.std(ddof=1) / len(values) ** 0.5:.3f}"


def table_row(summary: Summary) -> dict[str, str]:
    """Headings and cells of one policy, as the console and the report show them."""
    figures = summary.figures()
    return {
        "imbalance": f"{figures['imbalance_mean']:.3f}" + plus_minus(summary.imbalance),
        "p95": f"{figures['imbalance_p95']:.3f}",
        "max": f"{figures['imbalance_max']:.3f}",
        "delay": f"{figures['delay_mean']:.2f}",
        "max delay": f"{figures['delay_max']}",
        "padding": f"{figures['padding']:.2%}",
        "cut": f"{figures['cut_share']:.1%}",
        "keys/token": f"{figures['keys_per_token']:,.0f}",
        "plan ms": f"{figures['plan_ms']:.1f}",
        "longest": f"{figures['longest']:,}",
    }
