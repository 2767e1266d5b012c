"""Keys and values that slices of a document leave to later slices, from pass to pass."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from wlb_titan.memory.layer import TokenBytes
from wlb_titan.plan import Action


class CachedSlice(NamedTuple):
    """A slice of a document whose keys and values are cached, in tokens."""

    prefix: int  # of the document, before the slice
    length: int
    total: int  # of the whole document


class SliceCache:
    """Keys and values that slices leave to later slices, and their gradients, on one pipeline rank; from pass
    to pass, as `runtime.attention.kv_cache` keeps them."""

    def __init__(self, token: TokenBytes, layers: Sequence[int]) -> None:
        self._token, self._layers = token, layers
        # For each stage, bytes of each document that is going backward there, first in first out.
        self._gradients: dict[int, deque[float]] = defaultdict(deque)
        self.bytes_ = 0.0  # after the latest pass

    def begin(self, action: Action, slices: Sequence[CachedSlice], tokens: int) -> tuple[float, float]:
        """A pass begins.

        Returns:
            Additional bytes of the current layer: gradients of prefixes, and a copy of the keys if the pass
            has other documents too. And bytes of gradients that the pass leaves in the cache: it makes them
            layer by layer, and `end` adds them to `bytes_`.
        """
        token, layers = self._token, self._layers[action.stage]
        alone = len(slices) == 1 and tokens <= slices[0].length
        shared = 0.0 if alone else sum(s.prefix + s.length for s in slices) * token.cached
        if action.kind == "F":
            self.bytes_ += sum(s.total for s in slices if s.prefix == 0) * token.cached * layers
            return shared, 0.0
        return shared + sum(s.prefix for s in slices) * token.cached, sum(self._made(action, slices))

    def end(self, action: Action, slices: Sequence[CachedSlice]) -> None:
        """A pass is over; the backward pass of a document's first slice frees the document."""
        made = self._made(action, slices)
        self._gradients[action.stage].extend(made)
        self.bytes_ += sum(made)
        for slice_ in slices:
            if slice_.prefix == 0 and action.kind == "B":
                self.bytes_ -= slice_.total * self._token.cached * self._layers[action.stage]
                self.bytes_ -= self._gradients[action.stage].popleft()

    def _made(self, action: Action, slices: Sequence[CachedSlice]) -> list[float]:
        """Bytes of gradients of each document whose last slice goes backward."""
        if action.kind == "F":
            return []
        per_token = self._token.cached_gradients * self._layers[action.stage]
        return [s.prefix * per_token for s in slices if s.prefix + s.length == s.total]
