"""`wlb-titan profile`: measure the attention op and all else on the device at hand, for planning."""

from __future__ import annotations

import platform
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from wlb_titan import __version__
from wlb_titan.commands.console import say, show_table
from wlb_titan.commands.measure import (
    CPU_GRID,
    CPU_LINEAR,
    GPU_GRID,
    GPU_LINEAR,
    MILLISECONDS,
    ROUNDS,
    SECONDS,
    measure_linear,
    time_attention,
)
from wlb_titan.commands.options import TomlFile, check_outputs
from wlb_titan.cost.profile import AttentionShape, Entry, LinearProfile, Profile, fitted
from wlb_titan.errors import UserError
from wlb_titan.kernels import record
from wlb_titan.kernels.implementations import chosen, device_of
from wlb_titan.kernels.implementations import units as device_units
from wlb_titan.kernels.segments import Shape
from wlb_titan.runtime.models.facts import facts_of

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MOST = 1024  # elements of a head


class HeadDims(click.ParamType):  # type: ignore[type-arg]
    """`128`, or `192/128` where values have another head dim than queries and keys."""

    name = "D[/DV]"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        dims = str(value).split("/")
        if len(dims) > 2 or not all(dim.isdecimal() and 0 < int(dim) <= MOST for dim in dims):
            self.fail(
                f"{value!r} is no head dim, such as 128, nor two, such as 192/128, of at most {MOST}.",
                param,
                ctx,
            )
        return int(dims[0]), int(dims[-1])


@click.command()
@click.argument("file", type=TomlFile(), required=False, metavar="[FILE]")
@click.option(
    "--head-dim",
    type=HeadDims(),
    multiple=True,
    help="Of queries and keys, and of values if theirs is another; may be repeated.  [default: FILE's; 128]",
)
@click.option(
    "--group",
    type=click.IntRange(1, 1024),
    multiple=True,
    help="Query heads to a key head (grouped-query attention); may be repeated.  [default: FILE's; 1]",
)
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    help="[default: FILE's; or bfloat16 on a GPU, else float32]",
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
    file: Path | None,
    head_dim: tuple[tuple[int, int], ...],
    group: tuple[int, ...],
    dtype: str | None,
    device: str,
    output: Path,
) -> None:
    """Measure the attention of FILE's model on this device and all else that a layer does, for planning.

    Times forward and backward of wlb_titan's attention for segments of many shapes, fits the latency model to
    them and writes both as JSON, with the implementation that was measured. Takes about two minutes on a GPU
    and one on the CPU, for each head dim and group. Then matrix products, element-wise operators and, between
    the GPUs of a machine, all-gathers. Nothing else should use the device meanwhile. On Hopper it first tries
    Gluon's backward pass and records for training what came of it (docs/kernels.md).
    """
    check_outputs(output=output)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("There is no CUDA device here. Use --device cpu to profile the reference attention.")
    on_gpu = device == "cuda"
    shape = AttentionShape(dtype="bfloat16" if on_gpu else "float32")
    if file is not None:
        shape = facts_of(file).job.attention_shape
    dtype = dtype or shape.dtype
    head_dims = head_dim or ((shape.head_dim, shape.v_head_dim or shape.head_dim),)
    for dims in head_dims:
        _try_gluon(dims, DTYPES[dtype], torch.device(device))
    units = device_units(torch.device(device))
    entries: list[Entry] = []
    for dim, v_dim in head_dims:
        for heads_per_key in group or (shape.group,):
            entries += _measure(dim, v_dim, heads_per_key, dtype, device, units)
    ranks = torch.cuda.device_count() if on_gpu else 1
    linear = measure_linear(GPU_LINEAR if on_gpu else CPU_LINEAR, dtype, device, ranks)
    name = (
        torch.cuda.get_device_name()
        if on_gpu
        else (f"CPU {platform.machine()}, {torch.get_num_threads()} threads")
    )
    software = f"torch {torch.__version__}, wlb_titan {__version__}"
    result = Profile(name, units, software, tuple(entries), linear)
    result.save(output)
    _print_table(result)
    _print_rates(linear)
    click.echo(f"Wrote {output}")


def _try_gluon(dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Has Gluon's backward tried on this GPU, where `auto` would take it and nothing is recorded yet."""
    facts = device_of(device)
    if chosen("backward", "auto", dims, dtype, facts._replace(passed=frozenset({(dims, dtype)}))) != "gluon":
        return
    subject = record.subject(device, dims, dtype)
    found = record.verdict(subject)
    if found is None and (trial := record.trial(subject, device)) is not None:
        say(f"Trying Gluon's backward on {subject}: some minutes, in a process of its own")
        while found is None:
            found = trial.verdict(seconds=60.0)
        device_of.cache_clear()
    assert found is not None
    say("Gluon's backward has passed" if found.passed else f"Triton's backward is taken: {found.reason}")


def _measure(dim: int, v_dim: int, group: int, dtype: str, device: str, units: int) -> list[Entry]:
    grid = GPU_GRID if device == "cuda" else CPU_GRID
    heads = -(-grid.heads // group) * group
    shape = Shape(heads, heads // group, dim, v_dim)
    measured = AttentionShape(dim, heads, group, dtype, v_head_dim=None if v_dim == dim else v_dim)
    cases = list(grid.cases(heads))
    rule = "auto", (dim, v_dim), DTYPES[dtype], device_of(torch.device(device))
    kinds = chosen("forward", *rule), chosen("backward", *rule)
    label = f"{measured.kind}, {' and '.join(dict.fromkeys(kinds))}"
    timed = partial(
        time_attention, shape=shape, dtype=DTYPES[dtype], device=device, milliseconds=MILLISECONDS
    )
    rounds: list[list[tuple[float, float]]] = []
    start = time.monotonic()
    while len(rounds) < ROUNDS and (not rounds or time.monotonic() - start < SECONDS):
        with click.progressbar(cases, label=f"{label}, round {len(rounds) + 1}") as bar:
            rounds.append([timed(case.rows()) for case in bar])
    return fitted(measured, cases, np.median(rounds, axis=0) / 1e3, units, kinds)


def _print_table(result: Profile) -> None:
    """Prints the main coefficients, in microseconds, and how well all of them describe the measurements."""
    say(f"{result.device}: microseconds of a query head on one unit")
    rows = []
    for entry in result.entries:
        cost, errors = entry.cost, np.abs(entry.errors(result.units))
        rows.append(
            {
                "D": entry.shape.dims,
                "group": str(entry.group),
                "dtype": entry.dtype,
                "pass": entry.direction,
                "by": entry.implementation,
                "tiles": f"{cost.tiling.query_tile}x{cost.tiling.key_block}",
                "launch": f"{cost.launch * 1e6:.3g}",
                "tile": f"{cost.tile * 1e6:.3g}",
                "block": f"{cost.block * 1e6:.3g}",
                "error": f"{np.median(errors):.1%}",
                "95 %": f"{np.quantile(errors, 0.95):.1%}",
            }
        )
    show_table(rows)


def _print_rates(measured: LinearProfile) -> None:
    """Prints the measured rates under the names that they have in a cluster's file."""
    click.echo(
        f"Matrix products and element-wise operators, {measured.dtype}: [gpu] linear_flops = "
        f"{measured.matrix_flops:.3g}, memory_bandwidth = {measured.element_bandwidth:.3g}"
    )
    if measured.link is not None:
        click.echo(
            f"All-gathers over {measured.ranks} GPUs: [node] bandwidth = {measured.link.bandwidth:.3g}, "
            f"latency = {measured.link.latency:.2g}"
        )
