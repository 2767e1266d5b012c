"""Plug-ins that break the rules of docs/extending.md, or were written for other interfaces."""

from dataclasses import dataclass, replace

import numpy as np

from wlb_titan.context.all_gather import AllGather, PerDocument
from wlb_titan.context.layout import from_runs
from wlb_titan.cost.workload import Quadratic
from wlb_titan.dimensions.dimension import Dimension
from wlb_titan.packing.plain import Plain
from wlb_titan.packing.policy import PackingPolicy
from wlb_titan.packing.wlb import Wlb
from wlb_titan.pipeline.order import AsPacked


class Spoilt(Plain):
    def next(self):
        packing = super().next()
        return self.spoilt(packing, packing.packs)

    def spoilt(self, packing, packs):
        documents = self.other(packs[0].documents)
        packs[0] = replace(packs[0], documents=documents)
        return packing


BY_50 = np.array([0, 50, 0, 0])  # tokens
OTHER_DOCUMENTS = {  # in a step's first micro-batch
    "Loses": lambda documents: documents[1:],
    "Twice": lambda documents: np.concatenate([documents[:-1], documents[:1]]),
    "Beyond": lambda documents: documents + BY_50,
    "Before": lambda documents: documents - BY_50,
    "Unread": lambda documents: documents + 10_000 * np.eye(4, dtype=int)[0],
}
for name, other in OTHER_DOCUMENTS.items():
    globals()[name] = type(name, (Spoilt,), {"other": staticmethod(other), "__module__": __name__})


class TwiceMuchLater(Spoilt):
    steps, kept = 0, None

    def other(self, documents):
        self.steps += 1
        self.kept = documents if self.steps == 2 else self.kept
        return self.kept if self.steps == 18 else documents


class Fewer(Spoilt):
    def spoilt(self, packing, packs):
        packs.pop()
        return packing


class Empty(Spoilt):
    def spoilt(self, packing, packs):
        both = np.concatenate([packs[1].documents, packs[0].documents])
        packs[:2] = replace(packs[0], documents=both[:0]), replace(packs[1], documents=both)
        return packing


class Nothing(Spoilt):
    def spoilt(self, packing, packs):
        return None


class Forgets(Wlb):
    """Holds documents back and says nothing of it."""

    @property
    def waiting(self):
        return np.empty((0, 4), dtype=np.int64)


class OneRank(Spoilt):
    def spoilt(self, packing, packs):
        return replace(packing, assigned=[[0, 1], [0, 1]])


class HoldOut(AllGather):
    def divide(self, lengths, total, slices):
        number, share = np.arange(self.ranks), total // self.ranks
        return "divided", from_runs(number, *self.runs(number, share), lengths, self.ranks)


RUNS = {  # by ranks, where those of each begin and end
    "Overlap": lambda number, share: (0 * number, 0 * number + share),
    "Misses": lambda number, share: (number * share, number * share + share - 8),
    "Uneven": lambda number, share: (number * share + (number > 0) * 8, number * share + share + 8),
}
for name, runs in RUNS.items():
    globals()[name] = type(name, (HoldOut,), {"runs": staticmethod(runs), "__module__": __name__})


class Repeats(AsPacked):
    def places(self, forward, backward):
        return np.zeros(len(forward), dtype=np.int64)


class OldDivide(PerDocument):
    def divide(self, lengths, total):
        return super().divide(lengths, total, None)


class OldMaking(PerDocument):
    def __init__(self, config, ranks, latency):
        super().__init__(config, ranks, latency)


class NewNeed(Plain):
    def load_state_dict(self, state, version):
        pass


class Called(Plain):
    def waiting(self):
        return np.empty((0, 4), dtype=np.int64)


class Lacking(PackingPolicy):
    def __init__(self, config, stream, job):
        pass

    def next(self):
        pass


class OldLongest(Plain):
    @dataclass(kw_only=True, slots=True)
    class Config(Plain.Config):
        def longest(self):
            return 5


class OldCost(Quadratic):
    def of(self, config, job):
        return self


class OldJob(Plain):
    """Of before there was an `Ask`."""

    def __init__(self, config, stream, job):
        super().__init__(config, stream, job)
        self._ranks = job.degrees.context


class OldPeak(Dimension):
    axis = "old"

    def memory(self, peak):
        return peak


class Wider(PerDocument):
    """Takes more than it is given, and other names: that is no fault."""

    def __init__(self, settings, *rest, more=1):
        super().__init__(settings, *rest)

    def divide(self, lengths, total, slices, *, more=1):
        return super().divide(lengths, total, slices)


class OldAttention:
    """Knows nothing of `wants_lse`; the one mesh that it takes is no fault."""

    def __init__(self, config, mesh):
        pass

    def __call__(self, q, k, v, exchange, attend):
        return attend(q, k, v)


class Attended(PerDocument):
    attention = "toys_wrong:OldAttention"


class Moved(Dimension):
    axis, runtime = "moved", "toys_runtime:OldAxis"
