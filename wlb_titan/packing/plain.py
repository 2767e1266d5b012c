"""`plain`: the paper's data loader (Plain-4D, section 6.1). Documents in stream order fill one window after
another; nothing is balanced and nothing waits.

A document that a window's end cuts goes on in the next window as a new document (`tail = "carry"`), or its
rest is lost, as in the paper (`tail = "drop"`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from wlb_titan.documents.stream import DocumentStream, Pieces
from wlb_titan.packing.policy import Packing, PackingPolicy
from wlb_titan.plan import LENGTH

if TYPE_CHECKING:
    from wlb_titan.job import Job


class Plain(PackingPolicy):
    """Documents fill windows of exactly `training.seq_len` tokens as they come (the paper's Plain-4D)."""

    @dataclass(kw_only=True, slots=True)
    class Config(PackingPolicy.Config):
        tail: Literal["carry", "drop"] = "carry"
        """What happens to the rest of a document that a window's end cuts. `carry` makes it the next window's
        first document, `drop` leaves it out, as in the paper, and counts the tokens lost."""

    variable_length = False
    balances = False

    def __init__(self, config: Config, stream: DocumentStream, job: Job) -> None:
        self._stream = stream
        self._micro_batches = job.micro_batches
        self._tail = config.tail

    def next(self) -> Packing:
        packs, lost = [], 0
        for _ in range(self._micro_batches):
            pieces, left_out = self._window()
            if self._tail == "drop":
                left_out += self._stream.skip_rest()
            lost += left_out
            packs.append(np.pad(pieces, ((0, 0), (0, 1))))  # DELAY is 0
        return Packing(packs, lost)

    def state_dict(self) -> dict[str, Any]:
        return {}  # the stream's cursor is all there is

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def _window(self) -> tuple[Pieces, int]:
        """One full window, and the tokens left out to give it a token to predict.

        A window of nothing but documents of one token would have no label. Its last place is then kept for
        the first token of a longer document; the single tokens met before one comes are left out. They have
        no label and no other token sees them, so nothing learns less for it.
        """
        pieces = self._stream.fill(self._stream.window)
        left_out = 0
        while not self._stream.has_label(pieces).any():
            left_out += int(pieces[-1, LENGTH])
            pieces = np.concatenate([pieces[:-1], self._stream.fill(1)])
        return pieces, left_out
