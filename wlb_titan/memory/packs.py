"""A replica's packs and passes, as memory sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from wlb_titan.context import ALL_KEYS, KeyShares
from wlb_titan.plan import ByPass, Flow


class CachedSlice(NamedTuple):
    """A slice of a document whose keys and values are cached, as memory sees it.

    Attributes:
        prefix: tokens of the document before it.
        length: its tokens.
        total: tokens of the whole document.
    """

    prefix: int
    length: int
    total: int


class PackSizes(NamedTuple):
    """A replica's packs, as memory sees them.

    Attributes:
        lengths: tokens of each, padding included; of one that ranks share a rank's share.
        slices: slices of each pack whose keys and values are cached; none where documents are not sliced.
        sharers: number of data-parallel ranks that share each pack.
        keys: what a rank has of each pack's keys.
    """

    lengths: Sequence[int]
    slices: Sequence[Sequence[CachedSlice]]
    sharers: Sequence[int]
    keys: Sequence[KeyShares]

    @classmethod
    def of(cls, lengths: Sequence[int], slices: Sequence[Sequence[CachedSlice]] = ()) -> PackSizes:
        """Packs of one rank each, of which every context-parallel rank gathers all keys."""
        number = len(lengths)
        return cls(lengths, slices or [()] * number, [1] * number, [ALL_KEYS] * number)

    def part(self, which: slice) -> PackSizes:
        """Some of them."""
        return PackSizes(self.lengths[which], self.slices[which], self.sharers[which], self.keys[which])


class Passes(NamedTuple):
    """What a replica runs in a step, as memory sees it.

    Attributes:
        packs: packs of its forward and of its backward passes.
        flow: what its pipeline ranks run, in one run; None is the schedule's own order.
    """

    packs: ByPass[PackSizes]
    flow: Flow | None = None

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Passes:
        """The passes of micro-batches of so many tokens, without slices."""
        packs = PackSizes.of(lengths)
        return cls(ByPass(packs, packs))
