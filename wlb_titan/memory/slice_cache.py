"""Keys and values that slices of documents leave to those behind them, and their gradients, over time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from wlb_titan.memory.layer import TokenBytes
from wlb_titan.memory.packs import CachedSlice
from wlb_titan.plan import Action


class SliceCache:
    """The cache of one pipeline rank, followed from pass to pass as `runtime.kv_cache` keeps it."""

    def __init__(self, token: TokenBytes, layers: Sequence[int]) -> None:
        self._token, self._layers = token, layers
        # Bytes by stage, of the documents that go backward there, first in first out.
        self._gradients: dict[int, deque[float]] = defaultdict(deque)
        self.bytes_ = 0.0

    def begin(self, action: Action, slices: Sequence[CachedSlice], tokens: int) -> tuple[float, float]:
        """A pass begins.

        Returns:
            Bytes that the layer at hand has beside what it has without a prefix: the gradients of prefixes,
            and a copy of the keys where other documents stand beside them. And bytes of gradients that the
            pass leaves in the cache: they are made layer by layer, and are in `bytes_` when it is over.
        """
        token, layers = self._token, self._layers[action.stage]
        alone = len(slices) == 1 and tokens <= slices[0].length
        shared = 0.0 if alone else sum(s.prefix + s.length for s in slices) * token.cached
        if action.kind == "F":
            self.bytes_ += sum(s.total for s in slices if s.prefix == 0) * token.cached * layers
            return shared, 0.0
        made = self._made(action, slices)
        return shared + sum(s.prefix for s in slices) * token.cached, sum(made)

    def end(self, action: Action, slices: Sequence[CachedSlice]) -> None:
        """A pass is over: with the backward pass of a document's first slice all of it goes."""
        made = self._made(action, slices)
        self._gradients[action.stage].extend(made)
        self.bytes_ += sum(made)
        for slice_ in slices:
            if slice_.prefix == 0 and action.kind == "B":
                self.bytes_ -= slice_.total * self._token.cached * self._layers[action.stage]
                self.bytes_ -= self._gradients[action.stage].popleft()

    def _made(self, action: Action, slices: Sequence[CachedSlice]) -> list[float]:
        """Bytes of gradients by document: the backward pass of its last slice makes them."""
        if action.kind == "F":
            return []
        each = self._token.cached_gradients * self._layers[action.stage]
        return [s.prefix * each for s in slices if s.prefix + s.length == s.total]
