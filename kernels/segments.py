"""Segments and options of attention, and the checks that make the kernels safe to launch.

A segment is a run of query tokens of one document and the keys it sees: one row (q_start, q_len, kv_start,
kv_len) of an int32 tensor on the CPU. Query i of a segment (0 <= i < q_len) attends to the keys

    kv_start  ...  kv_start + kv_len - q_len + i        (both included: causal, aligned at the end)

or, with a sliding window, only to the last `window` of these.

A document of 8 tokens that two context-parallel ranks share in four chunks, on the rank that holds the chunks
0 and 3, with all 8 keys gathered:

    q rows   0 1 | 2 3          segments = [[0, 2, 0, 2],      rows 0, 1 are tokens 0, 1 and see keys 0 ... 1
    token    0 1 | 6 7                      [2, 2, 0, 8]]      rows 2, 3 are tokens 6, 7 and see keys 0 ... 7

Rows of q in no segment are padding: their output is zero, and they take and give no gradient. Keys in no
segment are padding too. Segments may come in any order and may be empty (q_len 0); their key ranges may
overlap, their query ranges may not.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NO_WINDOW = 2**30  # more keys than any segment has, and far from overflowing int32
COLUMNS = ("q_start", "q_len", "kv_start", "kv_len")


class Options(NamedTuple):
    """The arguments of `varlen_attention` that say what is computed, and by what."""

    scale: float  # positive factor on the scores
    window: int | None = None  # keys that a query sees, the last ones, its own included; None for all
    implementation: str = "auto"  # one of implementations.IMPLEMENTATIONS
    sm_margin: int = 0
    """Multiprocessors that Gluon's kernels leave to others, like NCCL's. Triton's programs end one by one and
    let others in by themselves."""

    @property
    def reach(self) -> int:
        """The window, or a number that no segment reaches."""
        return min(self.window or NO_WINDOW, NO_WINDOW)


class Saved(NamedTuple):
    """Inputs and outputs of a forward pass, for its backward pass."""

    q: Tensor  # (Tq, Nq, D)
    k: Tensor  # (Tk, Nkv, D)
    v: Tensor  # (Tk, Nkv, Dv)
    out: Tensor  # (Tq, Nq, Dv)
    lse: Tensor  # (Nq, Tq)


@dataclass(frozen=True)
class Shape:
    q_heads: int
    kv_heads: int
    dim: int
    v_dim: int

    @property
    def name(self) -> str:
        dims = f"{self.dim}" if self.dim == self.v_dim else f"{self.dim}/{self.v_dim}"
        return f"D {dims}, {self.q_heads}:{self.kv_heads} heads"


def aligned(x: Tensor) -> Tensor:
    """x itself if kernels can read it (heads dense and side by side, tokens 16 bytes apart or a multiple, as
    where context parallelism gathers keys and values in one row), or else a copy."""
    if x.shape[1] == 1:
        x = x[:, 0].unsqueeze(1)  # whatever the stride from one head to the next was, there is no next
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) >= x.shape[1] * x.shape[2]
    fits = dense and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, options: Options) -> None:
    """Raise ValueError unless shapes, dtypes, devices and options fit. Reads no values: fakes pass too."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name} must be (tokens, heads, head dim), got shape {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"q is on {q.device} but {name} is on {x.device}")
        if x.dtype != q.dtype:
            raise ValueError(f"q is {q.dtype} but {name} is {x.dtype}")
    if not q.dtype.is_floating_point:
        raise ValueError(f"q, k and v must be floating point, got {q.dtype}")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} differ in tokens or heads")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q has head dim {q.shape[2]} but k has {k.shape[2]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads")
    if not options.scale > 0:
        raise ValueError(f"scale must be positive, got {options.scale}")
    if options.window is not None and options.window < 1:
        raise ValueError(f"window is the number of keys that a query sees, got {options.window}")
    if segments.dim() != 2 or segments.shape[1] != 4:
        raise ValueError(
            f"segments must be (S, 4) with columns {', '.join(COLUMNS)}; got {tuple(segments.shape)}"
        )
    if segments.dtype != torch.int32 or segments.device.type != "cpu":
        raise ValueError(f"segments must be int32 on the CPU, got {segments.dtype} on {segments.device}")


def check_segments(segments: np.ndarray, q_tokens: int, kv_tokens: int) -> None:
    """Raise ValueError, naming the first offending row, unless `segments` (S, 4) can be attended safely."""
    q_start, q_len, kv_start, kv_len = segments.astype(np.int64).T

    def refuse(bad: np.ndarray, why: str) -> None:
        if bad.any():
            row = int(bad.argmax())
            values = ", ".join(f"{c} {x}" for c, x in zip(COLUMNS, segments[row].tolist(), strict=True))
            raise ValueError(f"segments row {row} ({values}) {why}")

    refuse((segments < 0).any(axis=1), "has a negative number")
    refuse(q_start + q_len > q_tokens, f"reaches past the {q_tokens} queries")
    refuse(kv_start + kv_len > kv_tokens, f"reaches past the {kv_tokens} keys")
    refuse(kv_len < q_len, "has fewer keys than queries, so that its first queries would see nothing")

    rows = np.flatnonzero(q_len > 0)
    rows = rows[np.argsort(q_start[rows], kind="stable")]
    overlap = np.flatnonzero(q_start[rows[1:]] < (q_start + q_len)[rows[:-1]])
    if overlap.size:
        first, second = (int(rows[overlap[0] + i]) for i in (0, 1))
        raise ValueError(
            f"segments rows {first} and {second} overlap: queries {q_start[first]} to "
            f"{q_start[first] + q_len[first]} and {q_start[second]} to {q_start[second] + q_len[second]}"
        )
