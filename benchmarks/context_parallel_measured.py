"""Figure 15 in small and for real: two ranks' shards attend in two processes at once, prediction beside it.

    OMP_NUM_THREADS=1 wlb-titan profile --device cpu --head-dim 64 --output PROFILE
    python benchmarks/context_parallel_measured.py --profile PROFILE --output FILE

Each process has one thread and runs the CPU's reference attention, forward and backward, on its rank's
segments and the keys of the whole micro-batch. Both begin at a barrier, and the slower one counts, as in a
layer whose ranks meet in collectives; these are the same for all policies and left out. Times are processor
time, the least of several repeats, so that other load counts little.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from wlb_titan.kernels import varlen_attention
from wlb_titan.kernels.inputs import Shape, make_inputs

from wlb_titan.context import STRATEGIES, Sharding, segments
from wlb_titan.cost.attention_latency import slowest
from wlb_titan.cost.attention_profile import AttentionShape, Profile

RANKS = 2
TOKENS = 4096
ATTENTION = AttentionShape(head_dim=64, heads=4, group=1, dtype="float32")
PROFILE = Path(__file__).parent / "results" / "cpu" / "attention_profile.json"
POLICIES = ("per_sequence", "per_document", "adaptive", "hybrid")


def packs() -> dict[str, np.ndarray]:
    """Document lengths, each TOKENS in all."""
    rng = np.random.default_rng(0)
    result = {"one document": np.array([TOKENS]), "64 alike": np.full(64, TOKENS // 64)}
    for long in (1024, 2048, 3072):
        ends = np.cumsum(rng.integers(10, 200, TOKENS))
        ends = np.append(ends[ends < TOKENS - long], TOKENS - long)
        short = np.diff(ends, prepend=0)
        result[f"{len(short)} short, then one of {long}"] = np.append(short, long)
    return result


def time_rank(rank: int, work: list[np.ndarray], repeats: int, barrier: Any, results: Any) -> None:
    """Puts (rank, seconds) into `results`: float64 (len(work), repeats, 2), forward and backward."""
    torch.set_num_threads(1)
    heads = Shape(ATTENTION.heads, ATTENTION.heads // ATTENTION.group, ATTENTION.head_dim, ATTENTION.head_dim)
    everything = torch.tensor([[0, TOKENS, 0, TOKENS]], dtype=torch.int32)
    q, k, v, gradient = make_inputs(everything, heads, torch.float32, "cpu")
    q, gradient = q[: TOKENS // RANKS].clone(), gradient[: TOKENS // RANKS].clone()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seconds = np.empty((len(work), repeats, 2))
    for index, seen in enumerate(map(torch.from_numpy, work)):
        for repeat in range(-1, repeats):  # the first one warms up
            barrier.wait()
            begin = time.process_time()
            out = varlen_attention(*leaves, seen)
            middle = time.process_time()
            barrier.wait()
            again = time.process_time()
            torch.autograd.grad(out, leaves, gradient)
            if repeat >= 0:
                seconds[index, repeat] = middle - begin, time.process_time() - again
    results.put((rank, seconds))


def measure(shardings: list[tuple[Sharding, np.ndarray]], repeats: int) -> list[float]:
    """Seconds of the slowest rank, forward and backward, of each sharding of documents of these lengths."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(RANKS), context.Queue()
    processes = []
    for rank in range(RANKS):
        work = [segments(shards[rank], lengths) for shards, lengths in shardings]
        arguments = (rank, work, repeats, barrier, results)
        processes.append(context.Process(target=time_rank, args=arguments, daemon=True))
        processes[-1].start()
    by_rank = dict(results.get(timeout=1800) for _ in processes)
    for process in processes:
        process.join()
    seconds = np.stack([by_rank[rank] for rank in range(RANKS)])  # ranks, shardings, repeats, passes
    return seconds.max(axis=0).min(axis=1).sum(axis=1).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description="Sharding policies measured on the CPU with two processes.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", type=Path, default=PROFILE, help="made by `wlb-titan profile`")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    latency = Profile.load(arguments.profile).latency(ATTENTION)
    chosen = {
        (name, policy): STRATEGIES.configure(policy).make(RANKS, latency).shard(lengths, TOKENS)
        for name, lengths in packs().items()
        for policy in POLICIES
    }
    shardings = [(shards, packs()[name]) for (name, _), (_, shards) in chosen.items()]
    measured = measure(shardings, arguments.repeats)
    predicted = [slowest(latency.seconds(shards)) for shards, _ in shardings]

    table = Table("documents", *POLICIES, title="milliseconds measured (predicted), forward and backward")
    times = {key: pair for key, pair in zip(chosen, zip(measured, predicted, strict=True), strict=True)}
    for name in packs():
        cells = [f"{real * 1e3:.1f} ({said * 1e3:.1f})" for real, said in (times[name, p] for p in POLICIES)]
        table.add_row(name, *cells)
    Console(width=110).print(table)
    if arguments.output:
        records = [
            {"documents": name, "policy": policy, "chosen": chosen[name, policy][0]}
            | {"measured": real, "predicted": said}
            for (name, policy), (real, said) in times.items()
        ]
        arguments.output.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
