"""A packing policy and dimensions of parallelism as a user would write them; `own_policies` has others."""

import os

from wlb_titan.dimensions.dimension import Dimension, Meeting
from wlb_titan.packing.plain import Plain
from wlb_titan.pipeline.graph import PassTimes


class ByRank(Plain):
    """Plain windows; rank 1 turns those of the second step, as no policy may."""

    def __init__(self, config, stream, ask):
        super().__init__(config, stream, ask)
        self._steps = 0

    def next(self):
        packing = super().next()
        self._steps += 1
        if self._steps == 2 and os.environ["RANK"] == "1":
            packing.packs.reverse()
        return packing


class Apart(Dimension):
    """Data-parallel ranks that meet every other step and then all-reduce their weights."""

    axis, divides, every = "apart", "data", 2

    def meeting(self, rates, weights):
        return Meeting(4 * weights, 1)


class Twins(Dimension):
    """Ranks that do the same, next to each other, and compare what comes of it."""

    axis, outside, runtime = "twins", "tp", "toys_runtime:Comparing"

    def passes(self, rates, times):
        return PassTimes(2 * times.forward, times.inputs, times.weights)
