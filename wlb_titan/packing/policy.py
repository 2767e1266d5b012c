"""What every packing policy is: something that turns the stream into one step's packs after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.packing.slices import WorkOf, slice_work
from wlb_titan.plan import Flow

Documents = NDArray[np.int64]
"""int64 (n, 4), columns ID, START, LENGTH, DELAY as in `MicroBatch.documents`."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The packs of one step.

    Attributes:
        packs: one array of documents for each of the N micro-batches; each holds at least one piece with a
            token to predict.
        lost_tokens: tokens that this step's packing left out for good.
        gap: of a solver's packing, how far its largest work may be above the least possible, relatively; 0 is
            a proven optimum.
        slices: int64 (n, 2) for each pack, as of `MicroBatch.slices`; None where no document is sliced.
        assigned: of each data-parallel rank the numbers of its packs in the order of running, where the
        policy
            decides on that.
    """

    packs: list[Documents]
    lost_tokens: int = 0
    gap: float | None = None
    slices: list[NDArray[np.int64]] | None = None
    assigned: list[list[int]] | None = None

    def work(self, work_of: WorkOf) -> NDArray[np.float64]:
        """float64 (packs,), by a work of whole documents such as `CostModel.forward`."""
        slices = None if self.slices is None else np.concatenate(self.slices)
        firsts = np.cumsum([0] + [len(pack) for pack in self.packs[:-1]])
        return np.add.reduceat(slice_work(work_of, np.concatenate(self.packs), slices), firsts)


class PackingPolicy(ABC):
    """Packs the documents of one step after the other.

    Attributes:
        fixed_length: every micro-batch is exactly as long as the context window, so that a pipeline that
            knows one shape only can run it.
        balances: packs may be given to any data-parallel rank; otherwise they stay in stream order.
    """

    fixed_length: bool
    balances: bool

    @abstractmethod
    def next(self) -> Packing:
        """The packs of the next step."""

    def order(
        self,
        packing: Packing,
        forward: NDArray[np.float64],
        backward: NDArray[np.float64],
        dp_rank: int | None,
    ) -> tuple[Flow, ...] | None:
        """What the pipeline ranks run, as of `Plan.order`; None leaves it to the schedule.

        Args:
            packing: what `next` returned last.
            forward, backward: float64 (packs,), work of its packs.
            dp_rank: the data-parallel rank that asks; None for all of them.
        """
        return None

    @property
    def waiting(self) -> NDArray[np.int64]:
        """int64 (n,), lengths of the pieces that have arrived and not yet been packed."""
        return np.empty(0, dtype=np.int64)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that `next` depends on besides the stream and the settings; JSON-able."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken."""
