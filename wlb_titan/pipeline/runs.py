"""The order of a data-parallel rank's packs: they go through its pipeline in runs, each in a chosen order.

Ranks that share parameters (FSDP) meet in collectives at every layer of every micro-batch, so their k-th
micro-batches should be alike. `longest_first` and `shortest_first` sort the runs of all ranks and so keep
them alike; `best` is searched once for all of them, on the mean over the ranks of the longest, the second
longest and so on, and every rank's k-th longest then runs at the same place.
"""

from __future__ import annotations

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.errors import PlanError
from wlb_titan.pipeline.order import LongestFirst, MicroBatchOrder
from wlb_titan.pipeline.schedule import PipelineShape


class PipelineRuns:
    """How the micro-batches of a data-parallel rank go through its pipeline.

    Args:
        micro_batches: micro-batches of one run; a rank runs those of a step in one or several runs.

    Raises:
        PlanError: the order cannot be found for this pipeline.
    """

    def __init__(self, shape: PipelineShape, micro_batches: int, order: MicroBatchOrder.Config) -> None:
        self._micro_batches = micro_batches
        self._order: MicroBatchOrder = order.make(shape)
        self._longest_first = LongestFirst(LongestFirst.Config(), shape)

    def arranged(self, assigned: list[list[int]], forward: Floats, backward: Floats) -> list[list[int]]:
        """The packs of each data-parallel rank, in the order in which it runs them.

        Args:
            assigned: per rank the numbers of its packs, as they were packed; as many on every rank.
            forward: float64 (packs,), predicted time of each pack's forward pass, in any unit.
            backward: float64 (packs,), of its backward pass, in the same unit.

        Raises:
            PlanError: the packs of a rank cannot be divided into runs.
        """
        count = len(assigned[0])
        if count % self._micro_batches:
            raise PlanError(
                f"The {count} micro-batches of a data-parallel rank cannot be divided into pipeline runs of "
                f"{self._micro_batches}."
            )
        runs = np.array(assigned).reshape(len(assigned), -1, self._micro_batches)
        for run in range(runs.shape[1]):
            runs[:, run] = self._arranged_run(runs[:, run], forward, backward)
        arranged: list[list[int]] = runs.reshape(len(assigned), count).tolist()
        return arranged

    def _arranged_run(self, packs: Ints, forward: Floats, backward: Floats) -> Ints:
        """One run of all ranks: int64 (ranks, micro_batches) to the same in order."""
        if self._order.for_all and len(packs) > 1:
            packs = np.stack([_ordered(self._longest_first, row, forward, backward) for row in packs])
            places = self._order.places(forward[packs].mean(axis=0), backward[packs].mean(axis=0))
            return packs[:, places]
        return np.stack([_ordered(self._order, row, forward, backward) for row in packs])


def _ordered(order: MicroBatchOrder, packs: Ints, forward: Floats, backward: Floats) -> Ints:
    return packs[order.places(forward[packs], backward[packs])]
