"""Keys behind attention: a rank's heads attend in g equal groups, and while one attends, the keys of the next
travel; in the backward pass the gradients of one group's keys while the next is differentiated.

With attention a and exchange e of all groups in one pass, the first gather or the last reduction is exposed,
and what runs beside the others:

    seconds = e / g + (g - 1) / g max(e, a + t e) + a / g = a + e - (g - 1) / g min(a, (1 - t) e)

A collective takes a share t of the multiprocessors from the attention beside it. What a backward pass repeats
of the exchange is waited for before the first group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.layers.rates import Rates
from wlb_titan.plan import MicroBatch

COLLECTIVE = 16
"""Multiprocessors that a collective takes while it runs beside attention: assumed, not measured."""


def hidden(attention: Floats, exchange: Floats, groups: Floats, units: int) -> Floats:
    """Seconds of a pass's exchange that run beside its attention, of arrays that fit together.

    Args:
        units: multiprocessors of the device.
    """
    taken = min(COLLECTIVE / units, 1.0)
    return np.asarray((1 - 1 / groups) * np.minimum(attention, (1 - taken) * exchange))


def grouped(rates: Rates, sharded: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Micro-batches whose heads attend in the number of the strategy's groups that is predicted fastest."""
    result = list(sharded)
    for place, m in enumerate(sharded):
        own = rates.shared(m.sharers)
        groups = own.strategy.groups if own.strategy is not None else (1,)
        best = groups[0] if len(groups) == 1 else min(groups, key=partial(_seconds, own, m))
        if best != m.groups:
            result[place] = replace(m, groups=best)
    return result


def _seconds(rates: Rates, sharded: MicroBatch, groups: int) -> float:
    """Of a layer's attention and exchange in both passes of a micro-batch."""
    strategy = rates.of_group(groups).strategy
    assert strategy is not None and sharded.ranks is not None
    (figures,) = strategy.figures([(sharded.ranks, sharded.shared_length, sharded.elsewhere)])
    attention, exchange = groups * figures.seconds.max(axis=0), rates.exchanging.seconds(figures.travelling)
    waits = np.array(exchange.moving + groups * exchange.latency)
    beside = hidden(attention, waits, np.array(groups), rates.latency.units)
    return float((attention + waits - beside).sum())
