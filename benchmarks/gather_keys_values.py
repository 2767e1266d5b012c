"""Gathering keys and values for context parallelism: one collective for both against one for each.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 benchmarks/gather_keys_values.py --output FILE

Times the gather into document order, forward, and the reduce-scatter of the gradients, backward, without any
attention: the two ways alternate, and the least of all repeats counts. On accelerators NCCL is used.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from wlb_titan.runtime.attention.all_gather import Gather

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, DeviceMesh], tuple[torch.Tensor, torch.Tensor]]


def gather_apart(
    k: torch.Tensor, v: torch.Tensor, key_order: torch.Tensor, mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor]:
    """The baseline: each on its own, and autograd's gradient of the permutation."""

    def gather(x: torch.Tensor) -> torch.Tensor:
        sharded = DTensor.from_local(x, mesh, (Shard(0),), run_check=False)
        return sharded.redistribute(mesh, (Replicate(),)).to_local(grad_placements=(Partial(),))

    return gather(k).index_select(0, key_order), gather(v).index_select(0, key_order)


def gather_together(
    k: torch.Tensor, v: torch.Tensor, key_order: torch.Tensor, mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor]:
    sent = torch.empty((len(k), 0), dtype=torch.int64, device=k.device)
    return Gather(k, v, (key_order, sent, sent[:0]), [mesh]).finish()


def seconds(gather: Way, tokens: int, heads: int, device: torch.device, mesh: DeviceMesh) -> float:
    """One forward and backward pass, of the slowest rank."""
    k, v = (torch.randn(tokens // mesh.size(), heads, 128, device=device) for _ in range(2))
    k.requires_grad_()
    v.requires_grad_()
    order = torch.randperm(tokens, device=device)
    dist.barrier()
    begin = time.perf_counter()
    keys, values = gather(k, v, order, mesh)
    torch.autograd.backward([keys, values], [keys.detach(), values.detach()])
    if device.type != "cpu":
        torch.accelerator.synchronize()
    took = torch.tensor(time.perf_counter() - begin, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Write the times as JSON.")
@click.option("--repeats", default=20, show_default=True, help="Passes of each kind.")
def main(output: Path | None, repeats: int) -> None:
    """Compare the two ways for several numbers of tokens and heads of 128 numbers."""
    accelerator = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if accelerator else torch.device("cpu")
    dist.init_process_group()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    table = Table("tokens", "key heads", "apart, ms", "together, ms", "ratio")
    results = []
    for tokens in (1024, 4096, 16384):
        for heads in (1, 4):
            times = [
                [seconds(gather, tokens, heads, device, mesh) for gather in (gather_apart, gather_together)]
                for _ in range(repeats)
            ]
            apart, together = (min(column) * 1e3 for column in zip(*times, strict=True))
            results.append({"tokens": tokens, "heads": heads, "apart_ms": apart, "together_ms": together})
            table.add_row(
                f"{tokens:,}", str(heads), f"{apart:.2f}", f"{together:.2f}", f"{together / apart:.2f}"
            )
    if dist.get_rank() == 0:
        Console().print(table)
        if output is not None:
            record = {"device": str(device), "ranks": mesh.size(), "results": results}
            output.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
