"""SlimPack in simulation: the paper's 7B-128K job of WLB-LLM, and the trends of SlimPack's own experiments.

    python benchmarks/slimpack_simulated.py --output benchmarks/results/cpu/slimpack_simulated.json

First 7B-128K of WLB-LLM's Table 1 (TP 8, CP 2, PP 4, 64 H100), with 4 and 16 context windows a step and
attention at FlashAttention-3's published speed, under every policy: speedup over `plain` on 1F1B. And how
long it takes to plan a step of 32 MicroPacks for 4 pipeline ranks, and of 256 for 16.

Then SlimPack's section 6.2: its four models (Table 3) on 128 and 256 GPUs, context windows of 64K, 128K and
256K, three distributions of lengths, against windows filled with documents as they come. Its text names
neither degrees of parallelism nor lengths nor speedups but "up to 2.8x" and that the gain grows with the
context, so that ours are: TP 8, PP 4 (8 from 70B on), CP 2 (4 at 256K), DP what is left; 4M tokens a step;
the least activation checkpointing under which windows fit; log-normal lengths with the medians and tails of
its Figure 1 as its text describes them: most below 4K, GitHub shifted to the right, Wikipedia of two
clusters.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent / "reproduce"))

from paper import Setting, attention, configuration

from wlb_titan.cost.cluster import load_cluster
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import ModelShape
from wlb_titan.documents import Documents
from wlb_titan.job import Job, Policy
from wlb_titan.memory.layer import MemorySettings
from wlb_titan.packing.slim.slim import Slim
from wlb_titan.simulator.choice import Scenario
from wlb_titan.simulator.step import Prediction

GIB = 2**30
TOKENS = 4 << 20  # of a step
VOCABULARY = 128_256
CHUNKS = 4  # stages a rank, where interleaved
SETTING = Setting("FA3", CHUNKS, hidden=1.0)
PLAIN, LAZY, SLIM = Policy("plain"), Policy("wlb_lazy", "adaptive", "best"), Policy("slim", "adaptive")


@dataclass
class Row:
    """A policy in a job."""

    job: str
    policy: str
    speedup: float
    bubble: float
    peak_gib: float
    fits: bool
    micropacks: int | None = None


def model(layers: int, hidden: int, heads: int, groups: int, feed_forward: int) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=groups,
        head_dim=hidden // heads,
        feed_forward=feed_forward,
        vocabulary=VOCABULARY,
    )


MODELS = {
    "7B": (model(32, 4096, 32, 32, 11008), 128),
    "13B": (model(40, 5120, 40, 40, 13824), 128),
    "70B": (model(80, 8192, 64, 8, 28672), 256),
    "150B": (model(96, 12288, 96, 8, 32768), 256),
}


def lengths(name: str, longest: int) -> NDArray[np.int64]:
    """Tokens of 200,000 documents, cut at `longest`."""
    random = np.random.default_rng(0)
    n = 200_000
    if name == "Common Crawl":  # short, and a long tail
        result = np.exp(random.normal(np.log(700), 1.2, n))
        tail, low = random.random(n) < 0.01, 16384
    elif name == "GitHub":  # shifted to the right
        result = np.exp(random.normal(np.log(1500), 1.4, n))
        tail, low = random.random(n) < 0.02, 16384
    else:  # Wikipedia: short articles, and long ones
        result = np.exp(random.normal(np.log(400), 0.8, n))
        tail, low = random.random(n) < 0.03, 8192
    result[tail] = low * (1 - random.random(int(tail.sum()))) ** -1.2
    return np.clip(result, 16, longest).astype(np.int64)


def scenario(size: str, window: int, data: str) -> Scenario:
    shape, gpus = MODELS[size]
    context, pipeline = (4 if window > 131072 else 2), (8 if gpus == 256 else 4)
    degrees = Degrees(tensor=8, context=context, pipeline=pipeline, shard=gpus // (8 * context * pipeline))
    job = Job(
        model=shape,
        degrees=degrees,
        cluster=load_cluster("h100_roce"),
        attention=attention(shape, degrees.tensor, SETTING),
        window=window,
        micro_batches=max(TOKENS // window // degrees.data, 1) * degrees.data,
        multiple=degrees.tensor,
        packing=Slim.Config(cost_model="simulated"),
    )
    for checkpointing in ("none", "selective", "full"):
        job = replace(job, memory=MemorySettings(checkpointing=checkpointing, window=window))
        if job.fitting.windows_fit:
            break
    return Scenario(job, Documents(lengths=lengths(data, window), name=data, seed=None))


def row(job: str, name: str, one: Scenario, policy: Policy, steps: int, base: Prediction) -> Row:
    plans = one.plans(policy, steps)
    prediction = one.simulate(policy, plans)
    return Row(
        job=job,
        policy=name,
        speedup=prediction.tokens_per_second / base.tokens_per_second,
        bubble=prediction.bubble,
        peak_gib=prediction.peak_memory.total / GIB,
        fits=prediction.fits,
        micropacks=len(plans[0].of_rank(0)) if policy == SLIM else None,
    )


def wlb_job(windows: int, steps: int) -> list[Row]:
    interleaved = configuration(SETTING, "7B-128K", micro_batches=windows)
    one = interleaved.on(replace(interleaved.job, schedule="1F1B", chunks=1))
    packing = Slim.Config(micropacks=6 * windows, slack=4, cost_model="simulated")
    slack = one.on(replace(one.job, packing=packing))
    base = one.predict(PLAIN, steps)
    runs = [
        ("plain", one, PLAIN),
        ("plain, interleaved", interleaved, PLAIN),
        ("wlb", one, Policy("wlb", "adaptive")),
        ("wlb_lazy, best order", one, LAZY),
        ("wlb_lazy, best order, interleaved", interleaved, LAZY),
        ("slim", one, SLIM),
        (f"slim, {6 * windows} packs, slack 4", slack, SLIM),
        ("slim, interleaved", interleaved, SLIM),
    ]
    return [row(f"7B-128K, N = {windows}", name, run, policy, steps, base) for name, run, policy in runs]


def trend(size: str, window: int, data: str, steps: int) -> list[Row]:
    one = scenario(size, window, data)
    base = one.predict(PLAIN, steps)
    job = f"{size}, {window >> 10}K, {data}"
    runs = [("plain", one, PLAIN), ("wlb_lazy, best order", one, LAZY), ("slim", one, SLIM)]
    return [row(job, name, run, policy, steps, base) for name, run, policy in runs]


def plan_time(micropacks: int, pipeline: int, steps: int) -> dict[str, float]:
    """Milliseconds for the plan of a step of 7B-128K: packing, order of passes and shares of CP ranks."""
    one = configuration(SETTING, "7B-128K", micro_batches=micropacks // 4)
    packing = Slim.Config(micropacks=micropacks, slack=2, cost_model="simulated")
    degrees = replace(one.job.degrees, pipeline=pipeline)
    job = replace(one.job, degrees=degrees, packing=packing, schedule="1F1B", chunks=1, stage_layers=())
    plans = one.on(job).plans(SLIM, steps)
    taken = [plan.plan_ms for plan in plans]
    return {
        "micropacks": micropacks,
        "pipeline": pipeline,
        "ms": float(np.median(taken)),
        "most_ms": max(taken),
    }


@click.command()
@click.option("--steps", default=10, show_default=True, help="Simulated steps of each job.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the results.")
def main(steps: int, output: Path | None) -> None:
    rows = [row for windows in (4, 16) for row in wlb_job(windows, steps)]
    for size in MODELS:
        for window in (65536, 131072, 262144):
            for data in ("Common Crawl", "GitHub", "Wikipedia"):
                rows += trend(size, window, data, steps)
    table = Table("job", "policy", "speedup", "bubble", "peak GiB", "packs", title="simulated, on H100")
    for one in rows:
        table.add_row(
            *(one.job, one.policy, f"{one.speedup:.3f}", f"{one.bubble:.3f}"),
            f"{one.peak_gib:.1f}" + ("" if one.fits else " (too much)"),
            str(one.micropacks or ""),
        )
    Console(width=120).print(table)
    times = [plan_time(micropacks, pipeline, steps) for micropacks, pipeline in ((32, 4), (256, 16))]
    for took in times:
        print(
            f"planning {took['micropacks']} MicroPacks for {took['pipeline']} pipeline ranks: "
            f"median {took['ms']:.0f} ms, at most {took['most_ms']:.0f}"
        )
    if output is not None:
        record = {"settings": {"steps": steps}, "rows": [asdict(one) for one in rows], "plan_times": times}
        output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
