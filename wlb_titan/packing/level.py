"""The level that loads reach when divisible work is poured into unequal bins."""

from __future__ import annotations

import numpy as np

from wlb_titan.arrays import Floats


def level(loads: Floats, capacities: Floats, work: float) -> float:
    """The level to which bins are filled if `work` is poured where the load is least.

    A bin below the level is filled up to it, or to its capacity. Computed exactly: the work that fits below a
    level is piecewise linear, with corners at the loads and capacities.

    Example: loads 1, 4 and 2 with capacities 9, 9 and 2.5 and 4.5 units of work give level 4.5: the bins
    then hold 4.5, 4.5 and 2.5.

    Args:
        loads: float64 (bins,), work in each bin.
        capacities: float64 (bins,), most that each may hold; not below its load.

    Returns:
        The level; infinity if the work does not fit.
    """
    corners = np.concatenate([loads, capacities])
    slopes = np.concatenate([np.ones(len(loads)), -np.ones(len(capacities))])
    order = np.argsort(corners, kind="stable")
    corners, filling = corners[order], np.cumsum(slopes[order])
    below = np.concatenate([[0.0], np.cumsum(np.diff(corners) * filling[:-1])])  # work that fits below
    segment = int(np.searchsorted(below, work, side="left")) - 1
    if segment < 0:
        return float(corners[0])
    if segment >= len(corners) - 1:
        return float("inf")
    return float(corners[segment] + (work - below[segment]) / filling[segment])
