"""Balanced micro-batches of a data set that fits into a list of lengths, epoch after epoch, for any trainer.

    sampler = wlb_titan.BalancedBatchSampler(lengths, ranks=8, micro_batches=4, sequences=256)
    loader = accelerator.prepare(DataLoader(dataset, batch_sampler=sampler, collate_fn=collate))

docs/python.md says what an epoch is. What finds no room in `tokens_per_rank` goes first in the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Ints
from wlb_titan.balancing import Assignment, Cost, balance, causal, check_counts
from wlb_titan.cost.workload import CostModel
from wlb_titan.errors import PlanError


class BalancedBatchSampler:
    """A DataLoader's `batch_sampler`: lists of sequences, those of rank 0, 1, ... of a micro-batch in turns.

    This is the order in which accelerate deals batches out to its processes; without accelerate, rank r takes
    every `ranks`-th list from the r-th on. Every process makes the same lists, and nothing is communicated.

    Args:
        lengths: tokens of each sequence.
        ranks: data-parallel processes.
        micro_batches: of each rank in a step, the trainer's gradient accumulation; an epoch's last step may
            have another number.
        sequences: of a step, of all ranks together.
        tokens_per_rank: most tokens of a micro-batch, never exceeded; None sets no limit.
        cost: as for `balance`; numbers have a row for each of the `lengths`.
        pool: steps that are dealt out together.
        seed: of the shuffles.
    """

    left_out: list[int]
    """Sequences that this epoch does not train: fewer than ranks, without room beside others. Mostly none."""

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[Any],
        *,
        ranks: int,
        micro_batches: int,
        sequences: int,
        tokens_per_rank: int | None = None,
        cost: Cost | CostModel | NDArray[Any] | None = None,
        pool: int = 1,
        seed: int = 0,
    ) -> None:
        check_counts(ranks=ranks, micro_batches=micro_batches, sequences=sequences, pool=pool)
        if sequences < ranks * micro_batches:
            raise PlanError(
                f"sequences is {sequences}; a step of {ranks} ranks x {micro_batches} micro-batches needs at "
                f"least {ranks * micro_batches}."
            )
        self._lengths = np.asarray(lengths)
        self.ranks, self.micro_batches, self._sequences = ranks, micro_batches, sequences
        self._tokens_per_rank, self._pool, self._seed = tokens_per_rank, pool, seed
        self._cost = causal() if cost is None else cost
        self._epoch: int | None = None
        self.set_epoch(0)

    @property
    def sampler(self) -> Self:
        """Where accelerate looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Plans this epoch: other shuffles, the same on every process."""
        if epoch == self._epoch:  # accelerate says it again whenever it begins
            return
        rng = np.random.default_rng([self._seed, epoch])
        self._plans: list[Assignment] = []
        self._batches: list[list[int]] = []
        left = rng.permutation(len(self._lengths))
        while len(left) >= self.ranks or not self._plans:
            steps = min(self._pool, max(len(left) // self._sequences, 1))
            taken, others = np.split(left, [steps * self._sequences])
            if len(others) < self.ranks:
                taken, others = left, left[:0]  # too few for a step of their own
            most = max(len(taken) // self.ranks, 1)
            for count in range(min(self.micro_batches * steps, most), most + 1):
                plan = self._planned(taken, count)
                left = np.concatenate([taken[plan.waiting], others])
                if not 0 < len(left) < self.ranks:
                    break  # else they need another micro-batch in this step, the last
            self._plans.append(plan)
            # Simultaneous micro-batches are alike, and each step gets some of all weights.
            for number in rng.permutation(len(plan.micro_batches[0])):
                self._batches += [taken[of_rank[number]].tolist() for of_rank in plan.micro_batches]
        self.left_out, self._epoch = left.tolist(), epoch

    def _planned(self, taken: Ints, micro_batches: int) -> Assignment:
        function = callable(self._cost) or isinstance(self._cost, CostModel)
        return balance(
            self._lengths[taken],
            ranks=self.ranks,
            micro_batches=micro_batches,
            tokens_per_rank=self._tokens_per_rank,
            cost=self._cost if function else np.asarray(self._cost)[taken],
            may_wait=True,
        )

    @property
    def imbalance(self) -> float:
        """Time of the epoch over its time if nobody waited; ranks meet at every micro-batch."""
        waited = sum(plan.work.max(axis=0).sum() for plan in self._plans)
        return float(waited / sum(plan.work.mean(axis=0).sum() for plan in self._plans))

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)
