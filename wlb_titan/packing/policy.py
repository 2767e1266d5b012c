"""What every packing policy is: something that turns the stream into one step's packs after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """

    packs: list[Documents]
    lost_tokens: int = 0
    gap: float | None = None


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
