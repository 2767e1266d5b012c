"""`wlb-titan profile`: measure the attention op on the device at hand, for planning."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import rich.box
import torch
from rich.console import Console
from rich.table import Table

from wlb_titan import __version__
from wlb_titan.cost.attention_fit import Point, fit, usual_tilings
from wlb_titan.cost.attention_profile import PASSES, Entry, Profile
from wlb_titan.errors import UserError
from wlb_titan.kernels.measure import Shape, time_attention

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ROUNDS = 3  # over all cases, some time apart: what disturbs the machine for a while does not reach the median
MILLISECONDS = 40.0  # for which a case is run again and again in each round; its time is the median


class Grid(NamedTuple):
    """Which cases are measured: each number of queries with each number of keys that is not smaller.

    Attributes:
        q_lens: queries of a segment; around multiples of 64 the steps between tiles show.
        kv_lens: keys of a segment; it is measured with as many keys as queries besides.
        keys: a case has as many segments as fit into so many keys, and one at least.
        pairs: most pairs of a query and a key, times heads, in one call.
        heads: query heads, rounded up to a multiple of the group.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    keys: tuple[int, ...]
    pairs: int
    heads: int

    def cases(self, heads: int) -> Iterator[tuple[int, int, int]]:
        """(q_len, kv_len, segments), all different."""
        for q_len in self.q_lens:
            for kv_len in sorted({q_len, *(k for k in self.kv_lens if k > q_len)}):
                most = self.pairs // (q_len * kv_len * heads)
                for segments in sorted({min(max(keys // kv_len, 1), most) for keys in self.keys} - {0}):
                    yield q_len, kv_len, segments


GPU_GRID = Grid(
    q_lens=(1, 16, 32, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512, *(2**i for i in range(10, 15))),
    kv_lens=tuple(2**i for i in range(7, 18)),
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


@click.command()
@click.option(
    "--head-dim", type=click.IntRange(1, 1024), multiple=True, help="May be repeated.  [default: 128]"
)
@click.option(
    "--group",
    type=click.IntRange(1, 1024),
    multiple=True,
    help="Query heads that share a key head (grouped-query attention); may be repeated.  [default: 1]",
)
@click.option(
    "--dtype", type=click.Choice(list(DTYPES)), help="[default: bfloat16 on a GPU, float32 on the CPU]"
)
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="Where the profile goes: JSON, for [wlb.sharding] profile.",
)
def profile(
    head_dim: tuple[int, ...], group: tuple[int, ...], dtype: str | None, device: str, output: Path
) -> None:
    """Measure the attention kernels of this device, for planning.

    Times forward and backward of wlb_titan's attention for segments of many shapes, fits the latency model to
    them and writes both as JSON. Takes some minutes on a GPU and about one on the CPU, for each head dim and
    group. Nothing else should use the device meanwhile.
    """
    if not os.access(output if output.exists() else output.absolute().parent, os.W_OK):
        raise UserError(f"--output {output} cannot be written.")  # before minutes are spent on it
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("There is no CUDA device here. Use --device cpu to profile the reference attention.")
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    name, units = _describe(device)
    entries: list[Entry] = []
    for dim in head_dim or (128,):
        for heads_per_key in group or (1,):
            label = f"head dim {dim}, group {heads_per_key}, {dtype}"
            entries += _measure(dim, heads_per_key, dtype, device, units, label)
    result = Profile(name, units, f"torch {torch.__version__}, wlb_titan {__version__}", tuple(entries))
    result.save(output)
    print_table(result, Console(highlight=False))
    click.echo(f"Wrote {output}")


def _describe(device: str) -> tuple[str, int]:
    """Name of the device, and how many programs it runs side by side."""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return properties.name, properties.multi_processor_count
    # The reference attention runs one block after the other; torch's threads share each of them.
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads", 1


def _measure(dim: int, group: int, dtype: str, device: str, units: int, label: str) -> list[Entry]:
    grid = GPU_GRID if device == "cuda" else CPU_GRID
    heads = -(-grid.heads // group) * group
    shape = Shape(heads, heads // group, dim, dim)
    cases = list(grid.cases(heads))
    times = []
    with click.progressbar(cases * ROUNDS, label=label) as bar:
        for q_len, kv_len, segments in bar:
            rows = _equal_segments(q_len, kv_len, segments)
            times.append(
                time_attention(rows, shape, dtype=DTYPES[dtype], device=device, milliseconds=MILLISECONDS)
            )
    seconds = np.median(np.reshape(times, (ROUNDS, len(cases), len(PASSES))), axis=0) / 1e3
    entries = []
    for direction, column in zip(PASSES, seconds.T.tolist(), strict=True):
        points = [Point(*case, heads, time) for case, time in zip(cases, column, strict=True)]
        cost = fit(points, units, usual_tilings(group)).cost
        entries.append(Entry(dim, group, dtype, direction, cost, tuple(points)))
    return entries


def _equal_segments(q_len: int, kv_len: int, segments: int) -> torch.Tensor:
    """int32 (segments, 4): one after the other, each with its own keys."""
    rows = np.zeros((segments, 4), dtype=np.int32)
    rows[:, 0] = np.arange(segments) * q_len
    rows[:, 1] = q_len
    rows[:, 2] = np.arange(segments) * kv_len
    rows[:, 3] = kv_len
    return torch.from_numpy(rows)


def print_table(result: Profile, console: Console) -> None:
    """Print the main coefficients, in microseconds, and how well all of them describe the measurements."""
    title = f"{result.device}: microseconds of a query head on one unit"
    table = Table(title=title, box=rich.box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for heading in ("D", "group", "dtype", "pass", "tiles", "launch", "tile", "block", "error", "95 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in result.entries:
        cost, errors = entry.cost, np.abs(entry.errors(result.units))
        table.add_row(
            str(entry.head_dim),
            str(entry.group),
            entry.dtype,
            entry.direction,
            f"{cost.tiling.query_tile}x{cost.tiling.key_block}",
            *(f"{seconds * 1e6:.3g}" for seconds in (cost.launch, cost.tile, cost.block)),
            f"{np.median(errors):.1%}",
            f"{np.quantile(errors, 0.95):.1%}",
        )
    console.print(table)
