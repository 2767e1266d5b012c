"""A sharding of the all-gather strategy."""

import numpy as np

from wlb_titan.context.all_gather import AllGather
from wlb_titan.context.layout import from_runs


class Contiguous(AllGather):
    """A stretch of the sequence for each rank: simple, and the last rank does most of the work."""

    def divide(self, lengths, total):
        begin = np.arange(self.ranks) * (total // self.ranks)
        end = begin + total // self.ranks
        return "contiguous", from_runs(np.arange(self.ranks), begin, end, lengths, self.ranks)
