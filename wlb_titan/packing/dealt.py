"""`dealt`: the windows of `plain`, dealt out to data-parallel ranks for equal work (docs/packing.md).

Windows go to ranks heaviest first (`bins.balanced`): the ranks' sums are nearly equal, and so are the windows
that they run at the same time. What windows still differ by, ranks can share. With `sharers` n, n windows
make a pack, light ones beside heavy ones, and n ranks run a pack together, as under DP-Merge (`slim`).

Example: windows of work 9, 8, 3 and 2 on 2 ranks: one has 9 and 2, the other 8 and 3. With 2 sharers these
are the packs, and each rank has half of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
from annotated_types import Interval

from wlb_titan.bins import balanced
from wlb_titan.cost.workload import workload
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.layers.rates import Rates
from wlb_titan.packing.plain import Plain
from wlb_titan.packing.policy import Ask, Packing, check_merging
from wlb_titan.plan import MicroBatch


class Dealt(Plain):
    """The windows of `plain`, dealt out to data-parallel ranks, which may share them (ours).

    Imbalance within a rank, delay and cut are those of `plain`; the sums of ranks are nearly equal.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Plain.Config):
        sharers: Annotated[int, Interval(ge=1, le=1024)] = 1
        """Data-parallel ranks that share every micro-batch, which has as many windows; a divisor of their
        number. More sharers make the work more equal, and more keys travel. Not with `ulysses`."""

        @property
        def merges(self) -> bool:
            return self.sharers > 1

        @property
        def always_shared(self) -> int:
            return self.sharers

        def check(self, rates: Rates) -> None:
            if rates.replicas % self.sharers:
                raise PlanError(
                    f"{self.sharers} of {rates.replicas} data-parallel ranks cannot share micro-batches; "
                    f"choose a number that divides {rates.replicas}.",
                    setting="packing.sharers",
                )
            check_merging(rates, self, "packing.sharers")

    balances = True

    def __init__(self, config: Config, stream: DocumentStream, ask: Ask) -> None:
        super().__init__(config, stream, ask)
        self._ask = ask
        self._replicas, self._sharers = ask.replicas, config.sharers

    def next(self) -> Packing:
        packing = super().next()
        windows, sharers = packing.packs, self._sharers
        if sharers == 1:
            return packing
        works = packing.work(partial(workload, self._ask.cost_model))
        rows = balanced(works, len(windows) // sharers)  # of the windows of each pack
        work = np.array([works[members].sum() for members in rows])
        packs: list[MicroBatch] = []
        assigned: list[list[int]] = []
        for group, numbers in enumerate(balanced(work, self._replicas // sharers)):
            ranks = range(group * sharers, (group + 1) * sharers)
            assigned += [list(range(len(packs), len(packs) + len(numbers)))] * sharers
            for number in numbers:
                documents = np.concatenate([windows[row].documents for row in rows[number]])
                packs.append(MicroBatch(documents, merged=ranks))
        return Packing(packs, packing.lost_tokens, assigned=assigned)
