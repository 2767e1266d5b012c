"""Keys behind attention: a rank's heads attend in g equal groups, and while one attends, the keys of the next
travel; in the backward pass the gradients of one group's keys while the next is differentiated.

With attention a and exchange e of all groups in one pass, the first gather or the last reduction is exposed,
and what runs beside the others:

    seconds = e / g + (g - 1) / g max(e, a + t e) + a / g = a + e - (g - 1) / g min(a, (1 - t) e)

A collective takes a share t of the multiprocessors from the attention beside it. What a backward pass repeats
of the exchange is waited for before the first group.
"""

from __future__ import annotations

import numpy as np

from wlb_titan.arrays import Floats

COLLECTIVE = 16
"""Multiprocessors that a collective takes while it runs beside attention: assumed, as NCCL's channels on one
H100 with 8 links."""


def hidden(attention: Floats, exchange: Floats, groups: Floats, units: int) -> Floats:
    """Seconds of a pass's exchange that run beside its attention, of arrays that fit together.

    Args:
        units: multiprocessors of the device.
    """
    taken = min(COLLECTIVE / units, 1.0)
    return np.asarray((1 - 1 / groups) * np.minimum(attention, (1 - taken) * exchange))
