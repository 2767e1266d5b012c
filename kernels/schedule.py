"""The tile lists of one micro-batch on its device, built once for all layers and both passes."""

from functools import cache, cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from . import tiles
from .configs import LONG
from .segments import check_segments


class Schedule:
    """Tile lists of `segments` ((S, 4) int32) on `device`, each made when first asked for.

    Raises ValueError for segments that cannot be attended safely.
    """

    def __init__(self, segments: np.ndarray, q_tokens: int, kv_tokens: int, device: torch.device):
        check_segments(segments, q_tokens, kv_tokens)
        self.segments, self.q_tokens, self.kv_tokens, self.device = segments, q_tokens, kv_tokens, device
        self.query_tiles = cache(self._query_tiles)
        self.key_tiles = cache(self._key_tiles)

    @cached_property
    def long(self) -> bool:
        """Whether a query's segment has `LONG` keys or more, in the mean over queries."""
        q_len, kv_len = self.segments[:, 1].astype(np.int64), self.segments[:, 3].astype(np.int64)
        return bool(q_len @ kv_len >= LONG * q_len.sum())

    @cached_property
    def bounds(self) -> Tensor:
        """(2, q_tokens): see tiles.row_bounds."""
        return tiles.row_bounds(self.segments, self.q_tokens, self.device)

    def _query_tiles(self, tokens: int, merge: bool = True) -> Tensor:
        return self._send(tiles.query_tiles(self.segments, self.q_tokens, tokens=tokens, merge=merge))

    def _key_tiles(self, tokens: int, block_n: int) -> tuple[Tensor, Tensor]:
        both = tiles.key_tiles(self.segments, self.kv_tokens, tokens=tokens, block_n=block_n)
        return self._send(both[0]), self._send(both[1])

    def _send(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            tensor = tensor.pin_memory().to(self.device, non_blocking=True)  # the host runs on
        return tensor


def schedule_of(segments: Tensor, q_tokens: int, kv_tokens: int, device: torch.device) -> Schedule:
    """The schedule of these segments, by their content: the tensor may be copied or changed meanwhile."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _schedule(segments.numpy().tobytes(), q_tokens, kv_tokens, device, stream)


# A pipeline stage holds several micro-batches between their forward and their backward. The stream belongs to
# the key because lists that were sent on one stream may not have arrived for another.
@lru_cache(maxsize=64)
def _schedule(rows: bytes, q_tokens: int, kv_tokens: int, device: torch.device, stream: int) -> Schedule:
    segments = np.frombuffer(rows, dtype=np.int32).reshape(-1, 4)
    return Schedule(segments, q_tokens, kv_tokens, device)
