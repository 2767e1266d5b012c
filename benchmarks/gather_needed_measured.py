"""One attention layer of context-parallel processes: only keys that are needed travel, beside all of them.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 benchmarks/gather_needed_measured.py

Forward and backward of the runtime's own all-gather attention, with the same `hybrid` sharding: once every
document's keys go to all ranks, and once only those that `hybrid` lets travel. The two ways alternate; the
slowest rank of each repeat counts, and of the repeats the median. "exchange" is the same with a sum of the
keys in the place of attention. On accelerators NCCL is used.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import click
import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from wlb_titan.kernels import varlen_attention

from wlb_titan.context import STRATEGIES, MoveSeconds
from wlb_titan.context.all_gather import AllGather
from wlb_titan.cost.attention_hopper import hopper
from wlb_titan.plan import Slices
from wlb_titan.runtime.attention.all_gather import AllGatherAttention
from wlb_titan.runtime.attention.meshes import divided

HEADS, DIM = 4, 64
LINK = 2e9  # bytes/s that the sharding weighs travelling keys with


def documents() -> dict[str, np.ndarray]:
    """Lengths of 8,192 tokens."""
    rng = np.random.default_rng(0)
    result = {"64 alike": np.full(64, 128)}
    for long in (2048, 4096):
        ends = np.cumsum(rng.integers(30, 400, 8192))
        ends = np.append(ends[ends < 8192 - long], 8192 - long)
        result[f"short, and one of {long}"] = np.append(np.diff(ends, prepend=0), long)
    result["one"] = np.array([8192])
    return result


def keys_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A stand-in for attention that reads all keys and gives all of them a gradient."""
    return q + k.mean(dim=0) + v.mean(dim=0), q


def seconds(
    attention: AllGatherAttention, tensors: list[torch.Tensor], exchange: tuple[torch.Tensor, ...], attend
) -> float:
    """One forward and backward pass, of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    out, _ = attention(*tensors, exchange, attend, wants_lse=False)
    torch.autograd.grad(out, tensors, torch.ones_like(out))
    if tensors[0].device.type != "cpu":
        torch.accelerator.synchronize()
    took = torch.tensor(time.perf_counter() - begin, device=tensors[0].device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def compare(lengths: np.ndarray, mesh: DeviceMesh, device: torch.device, repeats: int) -> dict[str, float]:
    """Milliseconds of each way, and tokens whose keys travel."""
    total, ranks = int(lengths.sum()), mesh.size()
    config = STRATEGIES.configure("hybrid")
    levels = config.owner.group_sizes(ranks)
    size = 2 * HEADS * DIM * 4
    moves = [MoveSeconds(3 * size * (n - 1) / n / LINK, 0.0) for n in levels]
    strategy: AllGather = config.make(ranks, hopper(DIM, HEADS), moves)
    _, sharding = strategy.shard(lengths, total)
    everything = Slices(np.zeros_like(lengths), np.ones(len(lengths), dtype=np.bool_))
    meshes = [divided(np.arange(ranks), sizes) for sizes in strategy.meshes]
    attention = AllGatherAttention(config, *meshes)
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    tensors = [
        torch.randn(total // ranks, HEADS, DIM, generator=generator).to(device).requires_grad_()
        for _ in range(3)
    ]
    found: dict[str, float] = {}
    times: dict[str, list[float]] = {}
    ways = {}
    for name, slices in (("all", everything), ("needed", None)):
        mask = strategy.mask(sharding, lengths, total, mesh.get_local_rank(), slices)
        exchange = tuple(torch.from_numpy(array).to(device) for array in mask.exchange)
        segments = torch.from_numpy(mask.segments)
        attend = partial(varlen_attention, segments=segments, return_lse=True)
        ways |= {name: (exchange, attend), f"{name}, exchange": (exchange, keys_alone)}
        travels = strategy.travelling(sharding, total, slices)
        found[f"{name}, travelling"] = sum(
            tokens * (n - 1) / n for tokens, n in zip(travels, levels, strict=True)
        )
    for repeat in range(-1, repeats):
        for name, (exchange, attend) in ways.items():
            took = seconds(attention, tensors, exchange, attend)
            if repeat >= 0:
                times.setdefault(name, []).append(took * 1e3)
    for name, taken in times.items():
        low, found[name], high = np.quantile(taken, (0.25, 0.5, 0.75)).tolist()
        found[f"{name}, spread"] = high - low
    return found


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Write the times as JSON.")
@click.option("--repeats", default=15, show_default=True, help="Passes of each kind.")
def main(output: Path | None, repeats: int) -> None:
    """Compare the two ways for several mixes of documents."""
    accelerator = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if accelerator else torch.device("cpu")
    dist.init_process_group()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    table = Table(
        "documents", "received: all, needed", "exchange, ms", "needed", "layer, ms", "needed", "gain"
    )
    results = []
    for name, lengths in documents().items():
        found = compare(lengths, mesh, device, repeats)
        results.append({"documents": name, **found})
        ways = ("all, exchange", "needed, exchange", "all", "needed")
        table.add_row(
            name,
            f"{found['all, travelling']:,.0f}, {found['needed, travelling']:,.0f}",
            *(f"{found[way]:.1f} ± {found[way + ', spread']:.1f}" for way in ways),
            f"{found['all'] / found['needed']:.2f}",
        )
    if dist.get_rank() == 0:
        Console(width=130).print(table)
        if output is not None:
            record = {"device": str(device), "ranks": mesh.size(), "results": results}
            output.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
