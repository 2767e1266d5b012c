"""What the attention benchmark runs on: segments, by the name of the question they answer.

The latency model is fitted to the grid of `wlb-titan profile`, measured in the same way, and checked by 20
packs that are not in it (attention_latency.py): whole ones, and what a context-parallel rank holds of one
under two shardings.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from wlb_titan.kernels.segments import Shape

from wlb_titan.commands.profile import CPU_GRID, GPU_GRID, GridCase
from wlb_titan.context import layout
from wlb_titan.context.layout import Sharding

WINDOW = 65536
SEEDS = 5  # and 20 packs
KINDS = {  # context-parallel ranks, which of them, and how the pack is divided
    "whole": (1, 0, None),
    "per sequence, rank 0 of 8": (8, 0, layout.per_sequence),
    "per sequence, rank 3 of 4": (4, 3, layout.per_sequence),
    "per document, rank 1 of 8": (8, 1, layout.per_document),
}


@dataclass(frozen=True)
class Case:
    """`documents`: lengths of the packed documents. `segments`: those of one rank, or of all."""

    group: str
    name: str
    documents: tuple[int, ...]
    segments: Tensor

    @property
    def dense(self) -> bool:
        """One whole document: what dense causal attention can run too."""
        return (
            len(self.documents) == 1 and len(self.segments) == 1 and self.segments[0, 1] == self.documents[0]
        )


def whole(lengths: list[int]) -> Tensor:
    """Segments of whole documents, one after the other."""
    lengths = np.asarray(lengths, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    return torch.from_numpy(np.stack([starts, lengths, starts, lengths], axis=1).astype(np.int32))


def shard(lengths: list[int], ranks: int, rank: int) -> Tensor:
    """Segments of one context-parallel rank that holds chunks `rank` and 2 ranks - 1 - rank of every
    document.

    Chunks of a document differ by at most one token; the keys of all ranks are there.
    """
    rows, q, kv = [], 0, 0
    for length in lengths:
        cuts = [length * i // (2 * ranks) for i in range(2 * ranks + 1)]
        for chunk in (rank, 2 * ranks - 1 - rank):
            begin, end = cuts[chunk], cuts[chunk + 1]
            if end > begin:
                rows.append([q, end - begin, kv, end])
                q += end - begin
        kv += length
    return torch.tensor(rows, dtype=torch.int32)


def pairs(segments: Tensor) -> int:
    """How many (query, key) pairs the segments let meet."""
    q_len, kv_len = segments.numpy().astype(np.int64).T[[1, 3]]
    return int((q_len * kv_len - q_len * (q_len - 1) // 2).sum())


def flops(segments: Tensor, shape: Shape) -> int:
    """Operations of the forward's two products over the real mask; the backward's are 2.5 times that."""
    return int(2 * pairs(segments) * shape.q_heads * (shape.dim + shape.v_dim))


def lognormal(total: int, median: int, seed: int, longest: int) -> list[int]:
    """Document lengths of a long-tailed corpus (sigma 1.2), cut at `longest`, that fill `total` tokens."""
    rng = np.random.default_rng(seed)
    lengths = []
    while sum(lengths) < total:
        lengths.append(int(np.clip(rng.lognormal(np.log(median), 1.2), 16, longest)))
    lengths[-1] -= sum(lengths) - total
    return [n for n in lengths if n > 0]


def short(total: int, low: int, high: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    lengths = []
    while sum(lengths) < total:
        lengths.append(int(rng.integers(low, high + 1)))
    return lengths


def cases(scale: int = 1) -> list[Case]:
    """All cases, the most telling first; every length divided by `scale`, for a try on a CPU.

    Groups: a one document, b mixes and ranks of them, c a long tail, d equal short documents, e more of a
    and b.
    """
    found = []

    def add(group: str, name: str, documents: list[int], segments: Tensor) -> None:
        found.append(Case(group, name, tuple(documents), segments))

    window = WINDOW // scale
    for length in (65536, 8192, 32768, 16384, 131072):
        group = "a" if length in (65536, 8192) else "e"
        add(group, f"one document of {length // 1024}K", [length // scale], whole([length // scale]))
    mixes = {
        "64K document": [window],
        "mix, median 2K": lognormal(window, 2048 // scale + 1, 0, window // 2),
        "mix with 32K": [window // 2, *lognormal(window // 2, 1024 // scale + 1, 1, window // 8)],
    }
    for name, documents in mixes.items():
        if len(documents) > 1:
            add("b", f"{name}, unsharded", documents, whole(documents))
        for ranks in (8, 2, 4):
            group = "b" if ranks == 8 else "e"
            add(group, f"{name}, rank 0 of {ranks}", documents, shard(documents, ranks, 0))
    tail = [window, *short(window, max(1, 100 // scale), 2000 // scale, 2)]
    add("c", "64K document and 64K of 100 to 2,000", tail, whole(tail))
    many = short(2 * window, max(1, 100 // scale), 2000 // scale, 3)
    add("c", "128K of 100 to 2,000", many, whole(many))
    uniform = [512 // scale] * 128
    add("d", "128 documents of 512", uniform, whole(uniform))
    return sorted(found, key=lambda case: case.group == "e")


class Pack(NamedTuple):
    """One rank's share of a packed sequence: all ranks' shares, and its own segments."""

    name: str
    shards: Sharding
    rank: int
    segments: Tensor


def packs(scale: int = 1) -> Iterator[Pack]:
    """Of 64K tokens and documents of 2K in the median, divided by `scale`; then four must do."""
    total = WINDOW // scale
    for seed in range(SEEDS if scale == 1 else 1):
        lengths = np.array(lognormal(total, 2048 // scale + 1, 10 + seed, total // 2))
        for kind, (ranks, rank, divide) in KINDS.items():
            shards = divide(lengths, total, ranks) if divide else (layout.whole_sequence(lengths),)
            segments = torch.from_numpy(layout.segments(shards[rank], lengths))
            yield Pack(f"pack {seed}, {kind}", shards, rank, segments)


def grid_cases(shape: Shape, device: str, scale: int = 1) -> list[GridCase]:
    """A GPU's; in a rehearsal a few of the CPU's, divided by `scale`."""
    if device == "cuda":
        return list(GPU_GRID.cases(shape.q_heads))
    few = CPU_GRID._replace(q_lens=(1, 16, 64), kv_lens=(16, 64), keys=(128,))
    return list(few.cases(shape.q_heads))
