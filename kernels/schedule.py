"""The lists of one micro-batch on its device, built once for all layers and both passes."""

from functools import cached_property, lru_cache
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import tiles
from .segments import NO_WINDOW, check_segments


class Key(NamedTuple):
    """What a schedule depends on besides the segments."""

    q_tokens: int
    kv_tokens: int
    reach: int  # keys that a query sees at most
    device: torch.device
    stream: int  # lists sent on one stream may not have arrived for another


class Lengths(NamedTuple):
    """Segments as cumulative lengths, as FlashAttention's varlen interface takes them."""

    q: Tensor  # int32 (n + 1,): where the queries of each sequence begin, and their number
    k: Tensor  # int32 (n + 1,): the same of the keys
    most_q: int  # queries of a sequence
    most_k: int
    rows: Tensor | None  # int64: the keys in the order of the sequences; None where they are all, as they lie


class Schedule:
    """Tile lists of `segments` ((S, 4) int32) on `key.device`, each made when first asked for."""

    def __init__(self, segments: np.ndarray, key: Key):
        check_segments(segments, key.q_tokens, key.kv_tokens)
        self.segments, self.key = segments, key
        self._packed_bounds: dict[int, Tensor] = {}
        self._query_tiles: dict[int, Tensor] = {}
        self._key_tiles: dict[tuple[int, int, int], tiles.KeyTiles] = {}

    @cached_property
    def mean_keys(self) -> float:
        """Keys of a query's segment or window, on average over queries."""
        q_len, kv_len = self.segments[:, 1].astype(np.int64), self.segments[:, 3].astype(np.int64)
        return float(q_len @ np.minimum(kv_len, self.key.reach) / max(1, q_len.sum()))

    @cached_property
    def bounds(self) -> Tensor:
        """(2, q_tokens): see tiles.row_bounds."""
        return tiles.row_bounds(self.segments, self.key.q_tokens, self.key.reach, self.key.device)

    @cached_property
    def lengths(self) -> Lengths:
        """Keys that lie in the order of their queries, as those of whole documents do, are read where they
        are: queries in no segment are a sequence without keys, keys in none one without queries. Others are
        gathered, as for two chunks of a document (example: `schedule_of`)."""
        q_tokens, kv_tokens, reach, device, _ = self.key
        q0, q1, k0, k1, _ = tiles.cover_of(self.segments, q_tokens)
        k0 = np.maximum(k0, k1 - (q1 - q0) - reach + 1)
        seen = k1 > k0
        begin, end = k0[seen], k1[seen]
        pairs = np.stack([q1 - q0, k1 - k0], axis=1)  # queries and keys of each sequence
        in_order = bool((begin[1:] >= end[:-1]).all())
        if in_order:
            unseen = np.zeros((len(pairs) + 1, 2), dtype=np.int64)  # before each sequence, and after the last
            unseen[np.append(seen, True), 1] = np.append(begin, kv_tokens) - np.append(0, end)
            pairs = np.stack([unseen, np.pad(pairs, ((0, 1), (0, 0)))], axis=1).reshape(-1, 2)
        pairs = pairs[pairs.any(axis=1)]
        q, k = tiles.send(np.pad(pairs, ((1, 0), (0, 0))).cumsum(axis=0).T.astype(np.int32), device)
        size = end - begin
        rows = np.arange(size.sum()) + np.repeat(begin - (np.cumsum(size) - size), size)
        return Lengths(q, k, *pairs.max(axis=0).tolist(), None if in_order else tiles.send(rows, device))

    def packed_bounds(self, pack: int) -> Tensor:
        """`bounds` of every row where `pack` heads of each token are packed; padded to 16 bytes, for TMA."""
        if pack not in self._packed_bounds:
            rows = self.bounds.repeat_interleave(pack, dim=1)
            self._packed_bounds[pack] = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 4))
        return self._packed_bounds[pack]

    def query_tiles(self, tokens: int) -> Tensor:
        """(n, 6): see tiles.query_tiles."""
        if tokens not in self._query_tiles:
            rows = tiles.query_tiles(self.segments, self.key.q_tokens, self.key.reach, tokens=tokens)
            self._query_tiles[tokens] = tiles.send(rows, self.key.device)
        return self._query_tiles[tokens]

    def key_tiles(self, tokens: int, block_n: int, turn_rows: int = 0) -> tiles.KeyTiles:
        shape = (tokens, block_n, turn_rows)
        if shape not in self._key_tiles:
            lists = {"tokens": tokens, "block_n": block_n, "turn_rows": turn_rows}
            on_host = tiles.key_tiles(self.segments, self.key.kv_tokens, self.key.reach, **lists)
            self._key_tiles[shape] = on_host.to(self.key.device)
        return self._key_tiles[shape]


def schedule_of(
    segments: Tensor, q_tokens: int, kv_tokens: int, device: torch.device, reach: int = NO_WINDOW
) -> Schedule:
    """Found by the segments' tensor and its version, which is quick, or by content. Writing to it by torch
    makes a new version; writing through a numpy array that shares its memory goes unnoticed.

    >>> chunks = torch.tensor([[0, 2, 0, 2], [2, 2, 0, 8]], dtype=torch.int32)
    >>> found = schedule_of(chunks, 4, 8, torch.device("cpu")).lengths
    >>> found.q.tolist(), found.k.tolist(), found.rows.tolist()
    ([0, 2, 4], [0, 2, 10], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7])
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = Key(q_tokens, kv_tokens, reach, device, stream)
    if segments.is_inference():  # these have no version
        return _schedule(segments.numpy().tobytes(), key)
    version, schedules = _recent.get(segments, (None, None))
    if version != segments._version:
        schedules = WeakValueDictionary()
        _recent[segments] = (segments._version, schedules)
    schedule = schedules.get(key)
    if schedule is None:
        schedule = schedules[key] = _schedule(segments.numpy().tobytes(), key)
    return schedule


_recent = WeakTensorKeyDictionary()


# A pipeline stage holds several micro-batches between their forward and their backward.
@lru_cache(maxsize=64)
def _schedule(rows: bytes, key: Key) -> Schedule:
    if key.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A replay would read host memory that other tile lists have by then.
        raise RuntimeError("Call attention once with these segments before a CUDA graph captures it.")
    return Schedule(np.frombuffer(rows, dtype=np.int32).reshape(-1, 4), key)
