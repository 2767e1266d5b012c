"""Two shardings of the all-gather strategy."""

import numpy as np

from wlb_titan.context.all_gather import AllGather
from wlb_titan.context.layout import document_chunks, from_runs


class Contiguous(AllGather):
    """A stretch of the sequence for each rank: simple, and the last rank does most of the work."""

    def divide(self, lengths, total, slices):
        begin = np.arange(self.ranks) * (total // self.ranks)
        end = begin + total // self.ranks
        return "contiguous", from_runs(np.arange(self.ranks), begin, end, lengths, self.ranks)


class RoundRobin(AllGather):
    """The paper's per-document sharding: equal chunks of a document, its last tokens dealt out one by one.

    They go to ranks 0, 1, 2 ... in turn, across documents, so that no rank is more than one ahead. Each is a
    tile of its own; `per_document` makes some chunks one token longer instead.
    """

    def divide(self, lengths, total, slices):
        begins = np.cumsum(lengths) - lengths
        rest = lengths % (2 * self.ranks)
        owner, begin, end = document_chunks(begins, lengths - rest, self.ranks)
        dealt = np.arange(rest.sum())
        token = np.repeat(begins + lengths - np.cumsum(rest), rest) + dealt
        return "round_robin", from_runs(
            np.concatenate([owner, dealt % self.ranks]),
            np.concatenate([begin, token]),
            np.concatenate([end, token + 1]),
            lengths,
            self.ranks,
        )
