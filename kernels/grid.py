"""The measurements that a latency model of the attention is fitted to: equal segments of many shapes.

`wlb-titan profile` and benchmarks/attention.py time the same cases in the same way. Most lengths are
multiples of no tile's size: the model counts tiles on average over where segments begin.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .measure import Shape, time_attention

ROUNDS = 3  # over all cases, some time apart: what disturbs the machine for a while does not reach the median
SECONDS = 100.0  # after which no further round is begun
MILLISECONDS = 40.0  # for which a case is run again and again in each round; its time is the median


class GridCase(NamedTuple):
    """`segments` equal segments, one after the other, of `q_len` queries and `kv_len` keys of their own."""

    q_len: int
    kv_len: int
    segments: int

    def rows(self) -> Tensor:
        """int32 (segments, 4), as the op takes them."""
        number = np.arange(self.segments)
        ones = np.ones_like(number)
        columns = (number * self.q_len, ones * self.q_len, number * self.kv_len, ones * self.kv_len)
        return torch.from_numpy(np.stack(columns, axis=1).astype(np.int32))

    def seconds(
        self,
        shape: Shape,
        *,
        dtype: torch.dtype,
        device: str,
        implementation: str = "auto",
        milliseconds: float = MILLISECONDS,
    ) -> tuple[float, float]:
        """Seconds of the forward and of the backward."""
        times = time_attention(
            self.rows(),
            shape,
            dtype=dtype,
            device=device,
            implementation=implementation,
            milliseconds=milliseconds,
        )
        return times[0] / 1e3, times[1] / 1e3


class Grid(NamedTuple):
    """Which cases are measured: each number of queries with each number of keys that is not smaller.

    q_lens: queries of a segment; around multiples of 64 the steps between tiles show.
    kv_lens: keys of a segment; it is measured with as many keys as queries besides.
    keys: a case has as many segments as fit into so many keys, and one at least.
    pairs: most pairs of a query and a key, times heads, in one call.
    heads: query heads, where nothing else decides them.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    keys: tuple[int, ...]
    pairs: int
    heads: int

    def cases(self, heads: int) -> Iterator[GridCase]:
        """All cases of so many query heads, each once."""
        for q_len in self.q_lens:
            for kv_len in sorted({q_len, *(k for k in self.kv_lens if k > q_len)}):
                most = self.pairs // (q_len * kv_len * heads)
                for segments in sorted({min(max(keys // kv_len, 1), most) for keys in self.keys} - {0}):
                    yield GridCase(q_len, kv_len, segments)


GPU_GRID = Grid(
    q_lens=(1, 50, 65, 129, 300, 700, 1500, 4000, 16000),
    kv_lens=(300, 1500, 6000, 24000, 96000),
    keys=(1, 2**18),  # one segment, for which there are more units than tiles, and many
    pairs=2**35,
    heads=32,
)
CPU_GRID = Grid(
    q_lens=(1, 16, 64, 128, 256, 257, 512, 1024),
    kv_lens=(128, 512, 2048),
    keys=(2**11, 2**12),
    pairs=2**24,
    heads=4,
)


def programs_at_a_time(device: str) -> int:
    """Units of the latency model: a GPU's multiprocessors. The reference on a CPU runs block after block, and
    torch's threads share each of them.
    """
    if torch.device(device).type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
