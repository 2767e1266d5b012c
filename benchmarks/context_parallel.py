"""Figure 15 of the paper in simulation: context-parallel sharding of a 7B layer, 4 ranks, windows of 64K and
128K.

    python benchmarks/context_parallel.py --output benchmarks/results/cpu/context_parallel.json

Predictions come from the planner's latency model in closed form. What they are judged by is computed another
way. Of FlashAttention-3, in which each segment has its own tiles as in the paper's kernel, every rank's query
tiles are listed one by one and scheduled, longest first, on 132 multiprocessors. Of wlb_titan's kernels,
which merge short segments, the tile lists are replayed (attention_replay.py). Prediction and judge use the
same coefficients, so this checks the decisions and the sharding, not the coefficients.

- Documents: lengths log-normal with 71 % of documents up to 1K tokens and 0.44 % above 32K, as in the length
  distribution that MagiAttention's benchmark publishes; longer than the window are cut to it; windows are
  filled one after the other as the paper's Plain-4D does, cutting the last document.
- 7B: head dim 128, 32 heads, hidden 4096, feed-forward 11008; tensor parallel 4 at 64K and 8 at 128K (Table
  1).
- A layer is its slowest rank's attention, forward and backward, and its matrix products at 600 TFLOP/s;
  communication is the same for all policies and left out.
- Speedup is total time under per_sequence over total time under the policy.
- oracle: the faster of per_sequence and per_document by scheduled time, the paper's "Optimal".
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from pathlib import Path

import numpy as np
from attention_replay import Backward, Forward
from rich.console import Console
from rich.table import Table

from wlb_titan import context
from wlb_titan.context import STRATEGIES
from wlb_titan.context.document import per_document_round_robin
from wlb_titan.context.hybrid import levels_of, tries
from wlb_titan.cost.attention_hopper import KERNELS, OWN, hopper
from wlb_titan.cost.attention_latency import AttentionLatency, KernelCost, KeyTiling, slowest

RANKS = 4
HEADS = {65536: 8, 131072: 4}  # of 32, by window: tensor parallel 4 and 8
LAYER_PARAMETERS = 4 * 4096**2 + 3 * 4096 * 11008
MATRIX_FLOPS = 600e12
THEIRS = {65536: {"per_document": 1.01}, 131072: {"per_document": 1.07}}
TITLES = {
    "flash_attention_3": "own tiles per segment (FlashAttention-3)",
    OWN: "short segments merged (wlb_titan's)",
}


def lengths_of_packs(window: int, packs: int, seed: int) -> list[np.ndarray]:
    """Documents of windows filled one after the other."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(6.004, 1.677, 3 * packs * window // 1000)).astype(np.int64)
    lengths = np.clip(lengths, 1, window)
    ends = np.unique(np.concatenate([np.cumsum(lengths), np.arange(1, packs + 1) * window]))
    pieces = np.diff(ends[ends <= packs * window], prepend=0)
    return np.split(pieces, np.searchsorted(np.cumsum(pieces), np.arange(1, packs) * window, side="left") + 1)


def tile_counts(segments: np.ndarray) -> np.ndarray:
    """int64 (2, tiles): blocks of 128 keys that each tile of 128 queries reads, and how many it masks."""
    tiles = -(-segments[:, 1] // 128)
    first = (np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * 128
    q_len, kv_len = np.repeat(segments[:, 1], tiles), np.repeat(segments[:, 3], tiles)
    before = kv_len - q_len + first
    blocks = -(-(before + np.minimum(128, q_len - first)) // 128)
    return np.stack([blocks, blocks - (before + 1) // 128])


def scheduled(segments: np.ndarray, cost: KernelCost, latency: AttentionLatency) -> float:
    """Seconds of a launch in which each free multiprocessor takes the longest tile left."""
    blocks, masked = tile_counts(segments)
    tiles = np.sort(cost.tile + cost.block * blocks + cost.masked * masked)[::-1]
    ends = [0.0] * latency.units
    for seconds in np.repeat(tiles, latency.heads).tolist():
        heapq.heapreplace(ends, ends[0] + seconds)
    return cost.launch + cost.segment * len(segments) * latency.heads / latency.units + max(ends)


def replayed(segments: np.ndarray, latency: AttentionLatency) -> tuple[float, float]:
    """Seconds of both passes of wlb_titan's kernels, each query head with keys of its own."""
    forward, backward = KERNELS[OWN].forward, KERNELS[OWN].backward
    around = backward.query * 1e-6 * segments[:, 1].sum() * latency.heads / latency.units
    passes = (
        Forward(tile=forward.tile, block=forward.block, masked=forward.masked),
        Backward(step=backward.block, tile=backward.program),
    )
    seconds = [one.milliseconds(segments, latency.heads, latency.heads) / 1e3 for one in passes]
    return seconds[0], seconds[1] + around


def simulate(shards: context.Sharding, lengths: np.ndarray, latency: AttentionLatency) -> float:
    """Seconds of attention that a layer waits for, from all tiles."""
    ranks = [context.segments(shard, lengths) for shard in shards]
    if isinstance(latency.backward.tiling, KeyTiling):
        return float(np.max([replayed(rank, latency) for rank in ranks], axis=0).sum())
    passes = (latency.forward, latency.backward)
    return sum(max(scheduled(rank.astype(np.int64), cost, latency) for rank in ranks) for cost in passes)


def compare(packs: list[np.ndarray], latency: AttentionLatency, window: int) -> dict[str, dict[str, float]]:
    """Per policy the speedup of attention and of the layer, and how far predictions are from the schedule."""
    adaptive, hybrid = (STRATEGIES.configure(name).make(RANKS, latency) for name in ("adaptive", "hybrid"))
    linear = 3 * 2 * LAYER_PARAMETERS * window / RANKS / (32 / latency.heads) / MATRIX_FLOPS
    seconds: dict[str, list[float]] = {}
    errors = []
    for lengths in packs:
        made = {
            "per_sequence": context.per_sequence(lengths, window, RANKS),
            "per_document": context.per_document(lengths, window, RANKS),
            "hybrid": min(
                tries(lengths, window, RANKS, latency, levels_of(RANKS)),
                key=lambda sharding: slowest(latency.seconds(sharding)),
            ),
        }
        real = {name: simulate(shards, lengths, latency) for name, shards in made.items()}
        predicted = {name: slowest(latency.seconds(shards)) for name, shards in made.items()}
        errors += [predicted[name] / real[name] - 1 for name in made]
        dealt = per_document_round_robin(lengths, window, RANKS)
        for name, value in {
            "per_sequence": real["per_sequence"],
            "per_document, remainder dealt out": simulate(dealt, lengths, latency),
            "per_document": real["per_document"],
            "adaptive": real[adaptive.shard(lengths, window)[0]],
            "oracle": min(real["per_sequence"], real["per_document"]),
            "hybrid": real[hybrid.shard(lengths, window)[0]],
            "oracle of all three": min(real.values()),
        }.items():
            seconds.setdefault(name, []).append(value)
    base = np.array(seconds["per_sequence"])
    result = {
        name: {
            "attention_speedup": float(base.sum() / np.sum(values)),
            "layer_speedup": float((base + linear).sum() / (np.array(values) + linear).sum()),
        }
        for name, values in seconds.items()
    }
    result["prediction"] = {
        "median_error": float(np.median(np.abs(errors))),
        "p95_error": float(np.quantile(np.abs(errors), 0.95)),
    }
    return result


def mixes(window: int, seed: int) -> dict[str, list[np.ndarray]]:
    """One long document of a share of the window, and short ones of 50 to 700 tokens."""
    rng = np.random.default_rng(seed)
    result = {}
    for share in (0.125, 0.25, 0.5):
        packs = []
        for _ in range(10):
            long = int(window * share)
            ends = np.cumsum(rng.integers(50, 700, window // 50))
            ends = np.append(ends[ends < window - long], window - long)
            packs.append(rng.permutation(np.append(np.diff(ends, prepend=0), long)))
        result[f"one of {long // 1024}K, {np.mean([len(p) - 1 for p in packs]):.0f} short"] = packs
    return result


def decision_times() -> dict[str, float]:
    """Milliseconds of processor time to shard 128K tokens, 300 documents, 8 ranks.

    Median over 50 micro-batches of the least of five runs, so that other load counts little.
    """
    latency = hopper(128, 4)
    result = {}
    for policy in ("per_sequence", "per_document", "adaptive", "hybrid"):
        strategy = STRATEGIES.configure(policy).make(8, latency)
        taken = []
        for seed in range(50):
            lengths = np.exp(np.random.default_rng(seed).normal(6.004, 1.677, 300))
            lengths = np.maximum(lengths / lengths.sum() * 131072, 1).astype(np.int64)
            lengths[0] += 131072 - lengths.sum()
            runs = []
            for _ in range(5):
                begin = time.thread_time()
                strategy.shard(lengths, 131072)
                runs.append((time.thread_time() - begin) * 1e3)
            taken.append(min(runs))
        result[policy] = float(np.median(taken))
    return result


def print_speedups(title: str, columns: dict[str, dict[str, dict[str, float]]], console: Console) -> None:
    table = Table("policy", *columns, title=title)
    for policy in next(iter(columns.values())):
        if policy != "prediction":
            cells = [
                f"{c[policy]['attention_speedup']:.3f} / {c[policy]['layer_speedup']:.3f}"
                for c in columns.values()
            ]
            table.add_row(policy, *cells)
    errors = [
        f"{c['prediction']['median_error']:.1%}, {c['prediction']['p95_error']:.1%}" for c in columns.values()
    ]
    table.add_row("prediction error: median, 95 %", *errors)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Figure 15 of the paper in simulation.")
    parser.add_argument("--packs", type=int, default=100, help="micro-batches for each window")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    console = Console(width=120)
    results: dict[str, object] = {"packs": arguments.packs, "theirs": THEIRS}
    for name, kernel in TITLES.items():
        latencies = {window: hopper(128, heads, kernel=name) for window, heads in HEADS.items()}
        figure15 = {
            f"{window // 1024}K": compare(lengths_of_packs(window, arguments.packs, seed=0), latency, window)
            for window, latency in latencies.items()
        }
        print_speedups(f"{kernel}: speedup over per_sequence, attention / layer", figure15, console)
        mixed = {
            name: compare(packs, latencies[131072], 131072) for name, packs in mixes(131072, seed=1).items()
        }
        print_speedups(f"{kernel}: one long document among short ones, 128K", mixed, console)
        results[kernel] = {"figure 15": figure15, "mixes": mixed}
    results["decision_ms"] = times = decision_times()
    console.print("milliseconds to decide, 128K tokens, 300 documents, 8 ranks:", times)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
