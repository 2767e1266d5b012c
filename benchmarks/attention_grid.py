"""The latency model of an implementation: the grid it is fitted to, and 20 packs by which the fit is checked.

The grid is that of `wlb-titan profile`, measured in the same way; what comes out is such a profile too. The
packs are not in it: whole ones, and what a context-parallel rank holds of one under two shardings.
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from attention_cases import WINDOW, lognormal
from torch import Tensor
from wlb_titan.kernels.segments import Shape

from wlb_titan.commands.profile import CPU_GRID, GPU_GRID, GridCase
from wlb_titan.context import layout
from wlb_titan.context.layout import Sharding
from wlb_titan.cost.profile import AttentionShape, Profile, fitted

GOAL = 0.05  # error of a pack's forward and backward together
SEEDS = 5  # and 20 packs
KINDS = {  # context-parallel ranks, which of them, and how the pack is divided
    "whole": (1, 0, None),
    "per sequence, rank 0 of 8": (8, 0, layout.per_sequence),
    "per sequence, rank 3 of 4": (4, 3, layout.per_sequence),
    "per document, rank 1 of 8": (8, 1, layout.per_document),
}


class Pack(NamedTuple):
    """One rank's share of a packed sequence: all ranks' shares, and its own segments."""

    name: str
    shards: Sharding
    rank: int
    segments: Tensor


def packs(scale: int = 1, seeds: int = SEEDS) -> Iterator[Pack]:
    """Four for each seed, of 64K tokens and documents of 2K in the median, divided by `scale`."""
    total = WINDOW // scale
    for seed in range(seeds):
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


def profiles(rows: list[dict]) -> dict[str, Profile]:
    """For each implementation that was measured, the fit for each of its shapes."""
    ceiling = next((row for row in rows if row["kind"] == "ceiling" and "units" in row), None)
    measured = [row for row in rows if row["kind"] == "grid" and "forward_ms" in row]
    if ceiling is None:
        return {}
    found: dict[str, Profile] = {}
    measured.sort(key=lambda row: (row["implementation"], row["shape"], row["cut"]))
    for (implementation, shape), same in groupby(
        measured, key=lambda row: (row["implementation"], row["shape"])
    ):
        times = {
            tuple(cut): np.median([(row["forward_ms"], row["backward_ms"]) for row in rounds], axis=0) / 1e3
            for cut, rounds in groupby(same, key=lambda row: row["cut"])
        }
        entries = fitted(
            attention(shape, ceiling["dtype"]),
            list(times),
            np.array(list(times.values())),
            ceiling["units"],
            (implementation, implementation),
        )
        before = found[implementation].entries if implementation in found else ()
        software = f"{implementation}, {ceiling['versions']}"
        found[implementation] = Profile(ceiling["device"], ceiling["units"], software, (*before, *entries))
    return found


def attention(shape: list[int], dtype: str) -> AttentionShape:
    heads, kv_heads, dim, v_dim = shape
    return AttentionShape(dim, heads, heads // kv_heads, dtype, None if dim == v_dim else v_dim)


def report(rows: list[dict], folder: Path) -> list[str]:
    """Writes the profiles; how well each describes its grid, and predicts the packs."""
    scale = min((row["scale"] for row in rows if row["kind"] == "packs" and "scale" in row), default=1)
    lines = []
    for implementation, profile in profiles(rows).items():
        path = folder / f"profile_{implementation}.json"
        profile.save(path)
        lines.append(f"\nlatency model of {implementation}, {path}")
        for entry in profile.entries:
            errors = np.abs(entry.errors(profile.units))
            lines.append(
                f"  {entry.shape.kind}, {entry.direction}: {len(errors)} cases met within "
                f"{np.median(errors):.1%} in the median, {np.quantile(errors, 0.95):.1%} for 95 %"
            )
        timed = [
            row
            for row in rows
            if row["kind"] == "packs" and row["implementation"] == implementation and "forward_ms" in row
        ]
        for shape, same in groupby(sorted(timed, key=lambda row: row["shape"]), key=lambda row: row["shape"]):
            latency = profile.latency(attention(shape, profile.entries[0].dtype))
            seconds = {row["case"]: (row["forward_ms"] + row["backward_ms"]) / 1e3 for row in same}
            errors = [
                latency.seconds(pack.shards)[pack.rank].sum() / seconds[pack.name] - 1
                for pack in packs(scale)
                if pack.name in seconds
            ]
            within = sum(abs(error) <= GOAL for error in errors)
            lines.append(
                f"  {len(errors)} packs, heads {shape[0]}:{shape[1]}: {within} predicted within {GOAL:.0%}, "
                f"mean error {np.mean(np.abs(errors)):.1%}, from {min(errors):+.1%} to {max(errors):+.1%}"
            )
    return lines
