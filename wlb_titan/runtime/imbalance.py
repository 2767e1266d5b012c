"""Imbalance of a plan at each level of 4D parallelism: between replicas, micro-batches, shards."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from wlb_titan.context import ContextStrategy, after
from wlb_titan.job import Job
from wlb_titan.plan import Plan, imbalance_degree
from wlb_titan.runtime.data.dataloader import Step


def step_figures(step: Step, job: Job, shadow: Job | None) -> dict[str, Any]:
    """What the plan of a step says of it, for metrics.jsonl; beside it that of the job's shadow."""
    plan = step.plan
    figures = {
        "tokens": plan.tokens,
        "labels": step.labels,
        "padding": plan.padding,
        **plan_figures(plan, job),
    }
    if step.shadow is not None and shadow is not None:
        figures |= {f"shadow/{key}": value for key, value in plan_figures(step.shadow, shadow).items()}
    return figures | step.source_figures


def plan_figures(plan: Plan, job: Job) -> dict[str, Any]:
    """How well a plan balances, and what that costs, for metrics.jsonl.

    Returns:
        What docs/metrics.md lists from `imbalance` to `longest_micro_batch`.
    """
    return {
        "imbalance": plan.imbalance,
        **rank_imbalance(plan, job.strategy),
        "cut_share": plan.cut_share(job.window),
        "keys_per_token": plan.keys_per_token,
        "delay_mean": plan.delay,
        "delay_max": plan.max_delay,
        "waiting_documents": plan.waiting_documents,
        "waiting_tokens": plan.waiting_tokens,
        "lost_tokens": plan.lost_tokens,
        "longest_micro_batch": plan.longest,
        "plan_ms": plan.plan_ms,
    }


def rank_imbalance(plan: Plan, strategy: ContextStrategy | None) -> dict[str, Any]:
    """Largest over mean predicted work at each level; 1.0 is perfect balance.

    Returns:
        What docs/metrics.md lists as `imbalance_dp`, `imbalance_pp` and, with context parallelism, as
        `imbalance_cp` and `sharding`, of the micro-batches that the plan divides.
    """
    replicas = range(1 + max(m.dp_rank for m in plan.micro_batches))
    workloads = [
        [[m.workload for m in one if m.dp_rank == rank] for one in plan.by_pass] for rank in replicas
    ]
    figures: dict[str, Any] = {
        "imbalance_dp": imbalance_degree([sum(map(sum, replica)) for replica in workloads]),
        "imbalance_pp": float(np.mean([imbalance_degree(*replica) for replica in workloads])),
    }
    divided = [
        (m.sharding, after(m.ranks, m.prefix))
        for m in plan.micro_batches
        if m.ranks is not None and not m.merged
    ]
    if divided and strategy is not None:
        times = [strategy.seconds(ranks).sum(axis=1) for _, ranks in divided]
        figures["imbalance_cp"] = float(np.mean([imbalance_degree(t) for t in times]))
        figures["sharding"] = dict(Counter(sharding for sharding, _ in divided))
    return figures
