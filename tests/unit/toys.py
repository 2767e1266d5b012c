"""A packing policy, a context-parallel strategy and dimensions of parallelism as a user would write them."""

import os
from dataclasses import dataclass

import numpy as np

from wlb_titan.context.all_gather import AllGather
from wlb_titan.context.layout import from_runs
from wlb_titan.dimensions.dimension import Dimension, Meeting
from wlb_titan.packing.plain import Plain
from wlb_titan.pipeline.graph import PassTimes


class Reversed(Plain):
    """Plain windows, those of a step in the opposite order."""

    @dataclass(kw_only=True, slots=True)
    class Config(Plain.Config):
        every: int = 1
        """Steps of which one is turned."""

    def __init__(self, config, stream, ask):
        super().__init__(config, stream, ask)
        self._every, self._step = config.every, 0

    def next(self):
        packing = super().next()
        if self._step % self._every == 0:
            packing.packs.reverse()
        self._step += 1
        return packing

    def state_dict(self):
        return {"step": self._step}

    def load_state_dict(self, state):
        self._step = state["step"]


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


class Contiguous(AllGather):
    """A stretch of the sequence for each rank: simple, and the last rank does most of the work."""

    def divide(self, lengths, total, slices):
        begin = np.arange(self.ranks) * (total // self.ranks)
        end = begin + total // self.ranks
        return "contiguous", from_runs(np.arange(self.ranks), begin, end, lengths, self.ranks)


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
