"""Policies beside each other in simulation: the tables of docs/slimpack.md, docs/sft.md and
docs/context_parallel.md.

    python benchmarks/simulated.py               # all of it: a quarter of an hour of a processor
    python benchmarks/simulated.py sft ulysses   # some of it

An experiment (`EXPERIMENTS`) makes groups of cases: jobs on the same documents, of which the first is what
the others' speedup, in tokens a second, is over. Its rows replace its earlier ones in
results/cpu/simulated.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import click
import numpy as np
from common import save, saved, show
from reproduce.paper import PAPER_DEGREES, Setting, attention, configuration

from wlb_titan.arrays import Ints
from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.cluster import load_cluster
from wlb_titan.cost.models import PAPER_MODELS, ModelShape
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import NAMED
from wlb_titan.job import Job, Policy
from wlb_titan.layers.recompute import MemorySettings
from wlb_titan.memory.rank import GIB
from wlb_titan.packing import POLICIES
from wlb_titan.packing.plain import Plain
from wlb_titan.packing.policy import Packing, drafts
from wlb_titan.packing.slim.slim import Slim
from wlb_titan.plan import ID, LENGTH, Plan
from wlb_titan.simulator.choice import WARM_UP, Scenario
from wlb_titan.simulator.step import simulate

CLUSTER = load_cluster("h100_roce")
FA3 = Setting("FA3", chunks=4, hidden=1.0)
PLAIN, WLB, SLIM = Policy("plain"), Policy("wlb", "adaptive"), Policy("slim", "adaptive")
LAZY = Policy("wlb_lazy", "adaptive", "best")
FULL = MemorySettings(checkpointing="full")


@dataclass(frozen=True)
class Case:
    """A job under its own policies on documents, after steps in which queues fill; its name in two words."""

    group: str
    name: str
    job: Job
    documents: Documents
    after: int = 0


Groups = Iterator[list[Case]]


def under(policy: Policy, group: str, name: str, one: Scenario) -> Case:
    return Case(group, name, one.job.under(policy), one.documents, WARM_UP)


def row(case: Case, steps: int) -> dict[str, Any]:
    """What is predicted of a case; the peak is the fullest GPU's."""
    plans = case.job.plans(case.documents, steps, after=case.after)
    found = simulate(case.job, plans)
    tokens = sum(plan.tokens for plan in plans)
    padding = sum(plan.padding for plan in plans)
    return {
        "group": case.group,
        "name": case.name,
        "seconds": float(found.seconds.mean()),
        "tokens_per_second": found.tokens_per_second,
        "bubble": found.bubble,
        "imbalance": float(np.mean([plan.imbalance for plan in plans])),
        "busiest_rank": float(np.mean([busiest(plan, case.job.degrees.data) for plan in plans])),
        "padding": padding / (tokens + padding),
        "whole": whole(plans),
        "packs": len(plans[0].of_rank(0)),
        "shared_by": sorted({len(m.merged) for plan in plans for m in plan.micro_batches if m.merged}),
        "peak_gib": found.peak_memory.total / GIB,
    }


def busiest(plan: Plan, ranks: int) -> float:
    """The largest over the mean work of data-parallel ranks."""
    loads = [sum(m.workload for m in plan.of_rank(rank)) for rank in range(ranks)]
    return max(loads) / float(np.mean(loads))


def whole(plans: list[Plan]) -> float:
    """Share of the documents of these steps that lie in one piece."""
    pieces = np.concatenate([plan.documents for plan in plans])
    counts = np.unique(pieces[:, ID], return_counts=True)[1]
    return float((counts == 1).mean())


def slices(_steps: int) -> Groups:
    """7B-128K of WLB-LLM's Table 1 (TP 8, CP 2, PP 4, 64 H100) with N context windows a step, attention at
    FlashAttention-3's published speed; interleaved are 4 stages a rank."""
    for windows in (4, 16):
        interleaved = configuration(FA3, "7B-128K", micro_batches=windows)
        one = interleaved.on(replace(interleaved.job, schedule="1F1B", chunks=1))
        packing = Slim.Config(micropacks=6 * windows, slack=4, cost_model="simulated")
        slack = one.on(replace(one.job, packing=packing))
        variants = [
            ("plain", one, PLAIN),
            ("plain, interleaved", interleaved, PLAIN),
            ("wlb", one, WLB),
            ("wlb_lazy, best order", one, LAZY),
            ("wlb_lazy, best order, interleaved", interleaved, LAZY),
            ("slim", one, SLIM),
            (f"slim, {6 * windows} packs, slack 4", slack, SLIM),
            ("slim, interleaved", interleaved, SLIM),
        ]
        yield [under(policy, f"N = {windows}", name, which) for name, which, policy in variants]


llama = partial(ModelShape, head_dim=128, vocabulary=128_256)
SLIMPACK_MODELS = {  # and GPUs
    "7B": (llama(layers=32, hidden=4096, heads=32, kv_heads=32, feed_forward=11008), 128),
    "13B": (llama(layers=40, hidden=5120, heads=40, kv_heads=40, feed_forward=13824), 128),
    "70B": (llama(layers=80, hidden=8192, heads=64, kv_heads=8, feed_forward=28672), 256),
    "150B": (llama(layers=96, hidden=12288, heads=96, kv_heads=8, feed_forward=32768), 256),
}
SLIMPACK_LENGTHS = {
    "Common Crawl": (700, 1.2, 0.01, 16384),  # short, and a long tail
    "GitHub": (1500, 1.4, 0.02, 16384),  # shifted to the right
    "Wikipedia": (400, 0.8, 0.03, 8192),  # short articles, and long ones
}
"""Median and sigma; share and least length of the Pareto tail."""


def trends(_steps: int) -> Groups:
    """SlimPack's section 6.2: its four models (Table 3) on 128 and 256 GPUs, three context windows, three
    distributions of lengths, against windows filled with documents as they come.

    Its text names neither degrees of parallelism nor lengths nor speedups but "up to 2.8x" and that the gain
    grows with the context, so that ours are: TP 8, PP 4 (8 from 70B on), CP 2 (4 at 256K), DP what is left;
    4M tokens a step; the least activation checkpointing under which windows fit; log-normal lengths with the
    medians and tails of its Figure 1 as its text describes them: most below 4K, GitHub shifted to the right,
    Wikipedia of two clusters.
    """
    for size in SLIMPACK_MODELS:
        for window in (65536, 131072, 262144):
            job = slimpack_job(size, window)
            for data in SLIMPACK_LENGTHS:
                one = Scenario(job, Documents(lengths=slimpack_lengths(data, window), seed=None))
                variants = (("plain", PLAIN), ("wlb_lazy, best order", LAZY), ("slim", SLIM))
                group = f"{size}, {window >> 10}K, {data}"
                yield [under(policy, group, name, one) for name, policy in variants]


def slimpack_job(size: str, window: int) -> Job:
    model, gpus = SLIMPACK_MODELS[size]
    context, pipeline = (4 if window > 131072 else 2), (8 if gpus == 256 else 4)
    degrees = Degrees(tensor=8, context=context, pipeline=pipeline, shard=gpus // (8 * context * pipeline))
    job = Job(
        model=model,
        degrees=degrees,
        cluster=CLUSTER,
        attention=attention(model, degrees.tensor, FA3),
        window=window,
        micro_batches=max((4 << 20) // window // degrees.data, 1) * degrees.data,
        multiple=degrees.tensor,
        packing=Slim.Config(cost_model="simulated"),
    )
    for checkpointing in ("none", "selective", "full"):
        job = replace(job, memory=MemorySettings(checkpointing=checkpointing, window=window))
        if job.fitting.windows_fit:
            break
    return job


def slimpack_lengths(name: str, longest: int) -> Ints:
    """Tokens of 200,000 documents, cut at `longest`."""
    median, sigma, share, low = SLIMPACK_LENGTHS[name]
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(np.log(median), sigma, 200_000))
    tail = random.random(len(lengths)) < share
    lengths[tail] = low * (1 - random.random(int(tail.sum()))) ** -1.2
    return np.clip(lengths, 16, longest).astype(np.int64)


def asymmetric(_steps: int) -> Groups:
    """7B-128K under `slim` with M MicroPacks and N context windows a step: selective and full activation
    checkpointing, and the asymmetric partition, which takes the place of full checkpointing; nothing hides
    tensor parallelism's collectives."""
    for windows, packs in ((4, (16, 32, 64, 128)), (16, (32, 64, 128))):
        one = configuration(Setting("FA3", 1, hidden=0.0), "7B-128K", micro_batches=windows)
        job = replace(one.job, schedule="1F1B")
        for micropacks in packs:
            cases = []
            for checkpointing, own_packs in (("selective", False), ("full", False), ("full", True)):
                packing = Slim.Config(
                    micropacks=micropacks, slack=2, cost_model="simulated", asymmetric=own_packs
                )
                memory = replace(job.memory, checkpointing=checkpointing)
                variant = one.on(replace(job, packing=packing, memory=memory))
                name = checkpointing + ", asymmetric" * own_packs
                cases.append(under(SLIM, f"N = {windows}, M = {micropacks}", name, variant))
            yield cases


def dp_merge(steps: int) -> Groups:
    """Sharing a dominating document among data-parallel ranks: WLB-LLM's 7B model (TP 8, CP 2, PP 4, full
    checkpointing) with one context window a rank and step. Every step gets one document of the whole window;
    the others are web pages, which in so long a window take little besides."""
    for window, ranks in ((131072, 4), (262144, 4), (262144, 8), (524288, 4), (524288, 8)):
        job = Job(
            window=window,
            micro_batches=ranks,
            degrees=Degrees(tensor=8, context=2, pipeline=4, shard=ranks),
            cluster=CLUSTER,
            multiple=8,
            memory=replace(FULL, window=window),
            context=STRATEGIES.configure("per_document"),
        )
        documents = dominated(window, (ranks - 1) * window, steps)
        cases = []
        for merge, name in ((False, "without"), ("auto", "with")):
            packing = Slim.Config(cost_model="simulated", dp_merge=merge)
            cases.append(Case(f"{window >> 10}K, DP {ranks}", name, replace(job, packing=packing), documents))
        yield cases


def dominated(window: int, room: int, steps: int) -> Documents:
    """As many documents as the steps take, in order: a window, and web pages up to the end of the step."""
    pages = NAMED["web"].draw(seed=0)
    lengths: list[int] = []
    first = 0
    for _ in range(steps):
        upto = first + int(np.searchsorted(np.cumsum(pages[first:]), room, side="right"))
        page = pages[first:upto].tolist()
        lengths += [window, *page, room - sum(page)]
        first = upto
    return Documents(lengths=np.maximum(np.array(lengths, dtype=np.int64), 1), seed=None)


class Greedy(Plain):
    """torchtitan's packing for fine-tuning: the next conversation begins a new window where it does not fit,
    and the rest of the window is padding; nothing is cut."""

    @dataclass(kw_only=True, slots=True)
    class Config(Plain.Config):
        pass

    def next(self) -> Packing:
        packs = []
        for _ in range(self._micro_batches):
            room, pieces = self._stream.window, []
            while True:
                ahead = self._stream.state_dict()
                piece = self._stream.arrive(1)
                if int(piece[:, LENGTH].sum()) > room:
                    self._stream.load_state_dict(ahead)
                    break
                room -= int(piece[:, LENGTH].sum())
                pieces.append(piece)
            packs.append(np.pad(np.concatenate(pieces), ((0, 0), (0, 1))))
        return Packing(drafts(packs))


def sft(_steps: int) -> Groups:
    """Supervised fine-tuning of a 7B model (LLaMA-2's shape) with full checkpointing on one host of 8 H100s,
    256K tokens a step or one window a data-parallel rank: made-up conversations, 95 % below 4,096 tokens, one
    of 4,300 above 32,768. A conversation above the window is cut by all; that is rare, and the rest is made
    for the window."""
    lengths = np.minimum(NAMED["chat"].draw(), 32768)
    for window, context in ((8192, 1), (16384, 1), (32768, 1), (32768, 2), (65536, 2), (131072, 4)):
        ranks = 8 // context
        documents = Documents(lengths=np.minimum(lengths, window))
        cases = []
        for name, packing, sharding in (
            ("plain", POLICIES.configure("plain"), "per_sequence"),
            ("greedy", Greedy.Config(), "per_sequence"),
            ("wlb_lazy", POLICIES.configure("wlb_lazy"), "hybrid"),
        ):
            job = Job(
                window=window,
                micro_batches=max(262144 // window, ranks),
                degrees=Degrees(context=context, shard=ranks),
                cluster=CLUSTER,
                memory=replace(FULL, window=window),
                packing=packing,
                context=STRATEGIES.configure(sharding),
            )
            cases.append(Case(f"{window >> 10}K, CP {context}, DP {ranks}", name, job, documents))
        yield cases


def ulysses(_steps: int) -> Groups:
    """Ulysses beside gathered keys, both under `wlb_lazy`: the paper's Table 1, and a model of few key heads.
    Lengths are log-normal (median 2,000 tokens, sigma 1.6), cut at the context window."""
    llama3_8b = replace(PAPER_MODELS["7B"], kv_heads=8, feed_forward=14336, vocabulary=128256)
    jobs = {}
    for name, degrees in PAPER_DEGREES.items():
        size, window = name.split("-")
        jobs[name] = (PAPER_MODELS[size], degrees, int(window.removesuffix("K")) * 1024)
    for size, model in (("7B", PAPER_MODELS["7B"]), ("Llama 3 8B", llama3_8b)):
        jobs[f"{size}, CP 8"] = (model, Degrees(context=8, shard=4), 131072)
        jobs[f"{size}, CP 16"] = (model, Degrees(context=16, shard=2), 131072)
    jobs["Llama 3 8B, TP 4 x CP 4"] = (llama3_8b, Degrees(tensor=4, context=4, shard=2), 131072)
    random = np.random.default_rng(0)
    for name, (model, degrees, window) in jobs.items():
        job = Job(
            model=model,
            degrees=degrees,
            window=window,
            micro_batches=max(degrees.pipeline * degrees.data, 4),
            multiple=degrees.tensor,
        )
        lengths = np.clip(random.lognormal(np.log(2000), 1.6, size=100_000), 16, window).astype(np.int64)
        one = Scenario(job, Documents(lengths=lengths, seed=None))
        yield [under(Policy("wlb_lazy", sharding), name, sharding, one) for sharding in ("hybrid", "ulysses")]


COLUMNS = {  # headings and formats
    "seconds": ("step, s", "{seconds:.3f}"),
    "tokens_per_second": ("tokens/s", "{tokens_per_second:,.0f}"),
    "speedup": ("speedup", "{speedup:.3f}"),
    "bubble": ("bubble", "{bubble:.1%}"),
    "imbalance": ("imbalance", "{imbalance:.3f}"),
    "busiest_rank": ("busiest rank over mean", "{busiest_rank:.2f}"),
    "padding": ("padding", "{padding:.1%}"),
    "whole": ("whole", "{whole:.1%}"),
    "packs": ("packs", "{packs}"),
    "shared_by": ("shared by", "{shared_by}"),
    "peak_gib": ("peak GiB", "{peak_gib:.1f}"),
}
EXPERIMENTS: dict[str, tuple[Callable[[int], Groups], int, str]] = {
    "slices": (slices, 10, "speedup bubble peak_gib packs"),
    "trends": (trends, 10, "speedup bubble peak_gib packs"),
    "asymmetric": (asymmetric, 10, "seconds bubble imbalance peak_gib"),
    "dp_merge": (dp_merge, 4, "seconds speedup busiest_rank peak_gib shared_by"),
    "sft": (sft, 60, "tokens_per_second speedup imbalance padding whole peak_gib"),
    "ulysses": (ulysses, 10, "seconds speedup peak_gib"),
}
"""Its cases, simulated steps, and columns of its table."""


def rows(groups: Groups, steps: int) -> Iterator[dict[str, Any]]:
    """Of all cases, with the speedup over the first of their group."""
    for cases in groups:
        base = None
        for case in cases:
            found = row(case, steps)
            base = base or found["tokens_per_second"]
            yield found | {"speedup": found["tokens_per_second"] / base}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(EXPERIMENTS)))
def main(names: tuple[str, ...]) -> None:
    """Run the experiments NAMES, or all."""
    for name in names or EXPERIMENTS:
        groups, count, shown = EXPERIMENTS[name]
        print(f"\n{name}: simulated, on H100\n")
        columns = {"": "{group}", "case": "{name}"} | dict(COLUMNS[key] for key in shown.split())
        found = show(columns, rows(groups(count), count))
        save("simulated", saved("simulated") | {name: {"steps": count, "rows": found}})


if __name__ == "__main__":
    main()
