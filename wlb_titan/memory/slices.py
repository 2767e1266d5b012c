"""Keys and values that slices of documents leave to those behind them, and their gradients, over time."""

from __future__ import annotations

from collections.abc import Sequence

from wlb_titan.memory.layer import TokenBytes
from wlb_titan.plan import Action, CachedSlice


class SliceCache:
    """The cache of one pipeline rank, followed from pass to pass as `runtime.kv_cache` keeps it.

    Args:
        token: bytes of one token.
        layers: of each stage of the pipeline.

    Attributes:
        bytes_: that it has now.
    """

    def __init__(self, token: TokenBytes, layers: Sequence[int]) -> None:
        self._token, self._layers = token, layers
        self._gradients: dict[int, float] = {}  # bytes by stage, of the document that goes backward there
        self.bytes_ = 0.0

    def begin(self, action: Action, slice_: CachedSlice, tokens: int) -> float:
        """A pass begins.

        Args:
            action: the pass.
            slice_: that its micro-batch has.
            tokens: of its micro-batch.

        Returns:
            Bytes that the layer at hand has beside what it has without a prefix: the gradients of the prefix,
            and a copy of its keys where other documents follow.
        """
        if not slice_.length:
            return 0.0
        layers = self._layers[action.stage]
        shared = (slice_.prefix + slice_.length) * self._token.cached if tokens > slice_.length else 0.0
        if action.kind == "F":
            if slice_.prefix == 0:
                self.bytes_ += slice_.total * self._token.cached * layers
            return shared
        if slice_.prefix + slice_.length == slice_.total:
            self._gradients[action.stage] = slice_.prefix * self._token.cached_gradients * layers
            self.bytes_ += self._gradients[action.stage]
        return shared + slice_.prefix * self._token.cached

    def end(self, action: Action, slice_: CachedSlice) -> None:
        """A pass is over: with the backward pass of a document's first slice all of it goes."""
        if slice_.length and slice_.prefix == 0 and action.kind == "B":
            kept = slice_.total * self._token.cached * self._layers[action.stage]
            self.bytes_ -= kept + self._gradients.pop(action.stage)
