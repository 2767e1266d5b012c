"""The paper's jobs in simulation: one distribution of lengths, one cluster, one set of rules for all figures.

Two numbers are calibrated, each on one fact of the paper, and then left alone:

- TAIL, the share of long documents: documents shorter than half the context window hold more than 75 % of
  the training tokens (section 2.2 of the later version; window 128K). Documents are log-normal, median 460
  tokens, sigma 1.3, but for a share TAIL of Pareto lengths with exponent 0.5 between 64K and 1M tokens.
- SLOWDOWN, the attention kernels' time over FlashAttention-3's published one: the original packing's
  imbalance of 1.44 in forward latency (Table 2, 7B-128K). `calibrated_slowdown` finds it.

The rest are rules. The loader fills windows with documents in order and cuts off what exceeds a window
(section 2.2), and every policy packs the documents as so cut. Every segment has its own tiles, as in the
paper's kernel. Activation checkpointing is the least that fits 80 GB with plain micro-batches, L_max the
longest that fits, up to two windows. Pipelines run 1F1B. Packing balances by the simulated times. Speedup is
tokens per second over Plain-4D's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from wlb_titan.cost.attention_hopper import MERGE_KEYS, hopper
from wlb_titan.cost.cluster import load_cluster
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import PAPER_DEGREES, PAPER_MODELS, ModelShape
from wlb_titan.documents import Documents
from wlb_titan.job import Job, Policy
from wlb_titan.memory.settings import MemorySettings
from wlb_titan.packing import POLICIES, PackingPolicy
from wlb_titan.plan import LENGTH
from wlb_titan.simulator.scenario import Scenario

TAIL = 0.006
SLOWDOWN = 3.0
CLUSTER = "h100_roce"
DOCUMENTS = 600_000


@cache
def documents(seed: int = 1) -> NDArray[np.int64]:
    """int64 (DOCUMENTS,), tokens of the corpus' documents."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(460), 1.3, DOCUMENTS))
    tail = rng.random(DOCUMENTS) < TAIL
    low, high = 65536**-0.5, (1 << 20) ** -0.5
    lengths[tail] = (low - rng.random(int(tail.sum())) * (low - high)) ** -2.0
    return np.maximum(lengths.astype(np.int64), 16)


@cache
def loaded(window: int, seed: int = 1) -> NDArray[np.int64]:
    """int64, the documents as the loader cuts them: what exceeds a window's end is left out."""
    pieces, room = [], window
    for length in documents(seed).tolist():
        pieces.append(min(length, room))
        room = room - pieces[-1] or window
    return np.array(pieces, dtype=np.int64)


def attention(model: ModelShape, tensor: int, *, merged: bool = False, slowdown: float = SLOWDOWN):
    """The kernel model of a rank; `merged` is wlb_titan's own kernel, which packs short segments together."""
    latency = hopper(model.head_dim, model.heads // tensor, merge_keys=MERGE_KEYS if merged else 0)
    slower = (latency.forward.slower(slowdown), latency.backward.slower(slowdown))
    return replace(latency, forward=slower[0], backward=slower[1])


def scenario(
    model: ModelShape,
    degrees: Degrees,
    window: int,
    *,
    micro_batches: int | None = None,
    slowdown: float = SLOWDOWN,
    packing: PackingPolicy.Config | None = None,
) -> Scenario:
    """A job of the paper on the corpus, with the least activation checkpointing that fits.

    Args:
        model, degrees: a row of Table 1.
        window: context window in tokens.
        micro_batches: of a global batch; PP x DP if not given, as in the paper.
        slowdown: of the attention kernels.
        packing: settings of the policies that have them.
    """
    job = Job(
        model=model,
        degrees=degrees,
        cluster=load_cluster(CLUSTER),
        attention=attention(model, degrees.tensor, slowdown=slowdown),
        window=window,
        micro_batches=micro_batches or degrees.pipeline * degrees.data,
        multiple=degrees.tensor,
    )
    for checkpointing in ("none", "selective", "full"):
        job = replace(job, memory=MemorySettings(checkpointing=checkpointing))
        memory = job.peak_memory([window] * degrees.pipeline)
        if max(rank.total for rank in memory) <= job.cluster.memory:
            break
    packing = replace(packing or POLICIES.configure("wlb"), cost_model="simulated")
    if packing.name in POLICIES.having("max_length"):
        packing = replace(packing, max_length=job.longest_that_fits or window)
    return Scenario(replace(job, packing=packing), Documents(lengths=loaded(window), seed=None))


def configuration(name: str, **changes) -> Scenario:
    """A row of Table 1, such as `7B-128K`."""
    size, window = name.split("-")
    tokens = int(window.removesuffix("K")) * 1024
    return scenario(PAPER_MODELS[size], PAPER_DEGREES[name], tokens, **changes)


def forward_imbalance(one: Scenario, policy: Policy, steps: int) -> float:
    """Table 2's measure: the largest micro-batch's forward latency over the step's mean, mean of steps."""
    cost = one.job.cost_model
    result = []
    for plan in one.plans(policy, steps):
        latency = [cost.forward(m.documents[:, LENGTH]).sum() for m in plan.micro_batches]
        result.append(max(latency) / np.mean(latency))
    return float(np.mean(result))


def calibrated_slowdown(target: float = 1.44, steps: int = 300) -> float:
    """The SLOWDOWN of which the original packing's imbalance is `target`, by bisection."""
    plans = configuration("7B-128K").plans(Policy("plain"), steps)
    low, high = 1.0, 8.0
    while high - low > 0.02:
        middle = (low + high) / 2
        cost = configuration("7B-128K", slowdown=middle).job.cost_model
        latency = [[cost.forward(m.documents[:, LENGTH]).sum() for m in plan.micro_batches] for plan in plans]
        imbalance = np.mean(np.max(latency, axis=1) / np.mean(latency, axis=1))
        low, high = (middle, high) if imbalance < target else (low, middle)
    return (low + high) / 2
