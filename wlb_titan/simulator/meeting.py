"""The ends of the passes of all replicas of a step, where data-parallel ranks share micro-batches (DP-Merge).

Replicas run their pipelines on their own; but the ranks that share a micro-batch gather its keys in every
layer, so that each of its passes begins on all of them when the last of them is ready. Every replica is run
again and again, a shared pass not before the latest begin that was found for it, until no begin changes:
begins only grow, and none beyond those of the one graph that all replicas with these edges are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.plan import Action, ByPass, MicroBatch

SETTLED = 1e-9  # of a step's time: less is no change


class Replica(NamedTuple):
    """One data-parallel rank in a step.

    Attributes:
        graph: graph of its passes.
        times: times of the passes, arrays (stages, n, 1).
        delays: float64 (n, 1), seconds of a forward pass' data from one pipeline rank to the next.
        backward_delays: the same of gradients.
        micro_batches: micro-batches of forward and of backward passes, in the order of their places.
    """

    graph: PipelineGraph
    times: PassTimes
    delays: Floats
    backward_delays: Floats
    micro_batches: ByPass[Sequence[MicroBatch]]

    def ends(self, earliest: Floats) -> Floats:
        """float64 (actions,), when each action ends that does not begin before `earliest`, of the same
        shape."""
        ends = self.graph.ends(self.times, self.delays, earliest[:, None], self.backward_delays)
        return np.asarray(ends[:, 0])


def ends_together(replicas: Sequence[Replica]) -> list[Floats]:
    """float64 (actions,) of each replica of a step, when its actions end."""
    earliest = [np.zeros(len(replica.graph.actions)) for replica in replicas]
    found = [replica.ends(own) for replica, own in zip(replicas, earliest, strict=True)]
    shared = _shared_passes(replicas)
    if not shared:
        return found
    seconds = [
        np.array([float(replica.times.of(action)[0]) for action in replica.graph.actions])
        for replica in replicas
    ]
    while True:
        later = set()
        tolerance = SETTLED * max(float(ends.max()) for ends in found)
        for places in shared:
            begin = max(found[rank][number] - seconds[rank][number] for rank, number in places)
            for rank, number in places:
                if begin > found[rank][number] - seconds[rank][number] + tolerance:
                    earliest[rank][number] = begin
                    later.add(rank)
        if not later:
            return found
        for rank in later:
            found[rank] = replicas[rank].ends(earliest[rank])


def _shared_passes(replicas: Sequence[Replica]) -> list[list[tuple[int, int]]]:
    """The ranks that run each shared pass, and its number in the graph of each."""
    passes: dict[tuple[int, Action], list[tuple[int, int]]] = {}
    for rank, replica in enumerate(replicas):
        for number, action in enumerate(replica.graph.actions):
            if merged := replica.micro_batches.of(action.kind)[action.place].merged:
                passes.setdefault((merged.start, action), []).append((rank, number))
    return list(passes.values())
