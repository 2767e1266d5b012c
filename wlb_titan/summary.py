"""Figures of plans: of one step, for metrics; of many steps, as in Table 2; and their standard errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats, Ints
from wlb_titan.context.layout import with_prefix
from wlb_titan.context.strategy import ContextStrategy
from wlb_titan.job import Job
from wlb_titan.plan import DELAY, LENGTH, Plan, imbalance_by_pass, imbalance_degree


@dataclass(frozen=True, slots=True)
class Summary:
    """Steps of one packing policy, without their documents."""

    imbalance: Floats  # float64 (steps,), imbalance degree
    plan_ms: Floats  # float64 (steps,)
    shares: Floats  # float64 (n,), work of every micro-batch over the mean of its step
    longest: int  # tokens of the longest micro-batch, padding included
    tokens: int
    padding: int
    lost: int  # tokens left out for good
    cut: float  # see `Plan.cut_share`
    keys: float  # that a token attends to, on average
    delays: Ints  # int64 (longest delay + 1,), tokens by the iterations that they waited
    gap: float | None  # largest of a solver's packings

    @classmethod
    def of(cls, plans: Iterable[Plan], window: int) -> Summary:
        """Reads at least one plan, one by one."""
        steps, works, gaps = [], [], []
        delays = np.zeros(1, dtype=np.int64)
        for plan in plans:
            counts = (plan.longest, plan.tokens, plan.padding, plan.lost_tokens)
            shares = (plan.tokens * plan.cut_share(window), plan.tokens * plan.keys_per_token)
            steps.append((plan.imbalance, plan.plan_ms, *counts, *shares))
            workloads = np.array([m.workload for m in plan.forward])
            works.append(workloads / workloads.mean())
            if plan.gap is not None:
                gaps.append(plan.gap)
            step = np.bincount(plan.documents[:, DELAY], plan.documents[:, LENGTH]).astype(np.int64)
            delays = np.pad(delays, (0, max(0, len(step) - len(delays))))
            delays[: len(step)] += step
        imbalance, plan_ms, longest, *sums = np.array(steps, dtype=float).T
        tokens, padding, lost, cut, keys = (float(column.sum()) for column in sums)
        whole = int(longest.max()), int(tokens), int(padding), int(lost)
        waited = delays, max(gaps, default=None)
        return cls(imbalance, plan_ms, np.concatenate(works), *whole, cut / tokens, keys / tokens, *waited)

    @property
    def delay(self) -> float:
        """Iterations that a token waited on average."""
        return float(np.arange(len(self.delays)) @ self.delays / self.tokens)

    def figures(self) -> dict[str, Any]:
        """The table's row."""
        return {
            "imbalance_mean": float(self.imbalance.mean()),
            "imbalance_p95": float(np.percentile(self.imbalance, 95)),
            "imbalance_max": float(self.imbalance.max()),
            "delay_mean": self.delay,
            "delay_max": len(self.delays) - 1,
            "padding": self.padding / (self.tokens + self.padding),
            "plan_ms": float(np.median(self.plan_ms)),
            "longest": self.longest,
            "lost_tokens": self.lost,
            "cut_share": self.cut,
            "keys_per_token": self.keys,
            "gap": self.gap,
        }


class Estimate(NamedTuple):
    value: float
    error: float | None = None  # standard error, in the unit of the value; None if there are too few steps

    @classmethod
    def mean(cls, values: NDArray[Any]) -> Estimate:
        error = float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
        return cls(float(values.mean()), error)

    @classmethod
    def rate(cls, amounts: NDArray[Any], seconds: Floats) -> Estimate:
        """The amount per second, from one amount and time per step."""
        value = float(amounts.sum() / seconds.sum())
        if len(seconds) < 2:
            return cls(value)
        deviations = amounts / value - seconds
        return cls(value, value * float(deviations.std(ddof=1) / seconds.mean() / len(seconds) ** 0.5))

    def over(self, base: Estimate) -> Estimate:
        """The ratio; over itself 1, without an error."""
        ratio = self.value / base.value
        if self == base or self.error is None or base.error is None:
            return Estimate(ratio)
        return Estimate(ratio, ratio * math.hypot(self.error / self.value, base.error / base.value))

    @property
    def relative(self) -> float | None:
        return self.error / self.value if self.error is not None and self.value else None

    def text(self, form: str, unit: str = "") -> str:
        """`1.05x ±0.04` for `.2f` and `x`."""
        return f"{self.value:{form}}{unit}" + ("" if self.error is None else f" ±{self.error:{form}}")

    @property
    def scatter(self) -> str:
        """The end of a sentence about a ratio that is hardly or not distinct from 1; else empty."""
        if self.error is None or abs(self.value - 1) > 2 * self.error:
            return ""
        return f": {'no' if abs(self.value - 1) <= self.error else 'hardly'} more than the scatter"


def bench_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Headings and cells of a bench's table."""
    return [
        {
            "policy": record["policy"],
            f"over {records[0]['policy']}": Estimate(record["over_first"], record["scatter"]).text(
                ".3f", "x"
            ),
            "predicted": "–" if record["predicted"] is None else f"{record['predicted']:.3f}x",
            "TFLOP/s": f"{record['flops_per_second'] / 1e12:,.4g}",
            "tokens/s": f"{record['tokens_per_second']:,.0f}",
            "imbalance": f"{record['imbalance']:.3f}",
            "bubble": f"{record['bubble']:.1%}",
            "peak GiB": f"{record['peak_gib']:.2f}",
        }
        for record in records
    ]


def best_in_turns(records: Sequence[Mapping[str, Any]]) -> str:
    """A bench's answer, without its full stop."""
    best, base = fastest(records), records[0]["policy"]
    if best is records[0]:
        return f"Nothing here trains faster than {base} on this machine"
    gain, expected = Estimate(best["over_first"], best["scatter"]), best["predicted"]
    said = f"{best['policy']} trains {gain.text('.2f', 'x')} as fast as {base} on this machine"
    return said + ("" if expected is None else f" (predicted {expected:.2f}x)") + gain.scatter


def fastest(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(records, key=lambda record: record["over_first"])


def plan_figures(plan: Plan, job: Job) -> dict[str, Any]:
    """A plan's balance and its price, by the keys of docs/metrics.md."""
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
    """Largest over mean predicted work: of data-parallel ranks, of a pipeline's micro-batches and, if these
    are sharded, of context-parallel ranks; and the number of each sharding."""
    replicas = range(1 + max(m.dp_rank for m in plan.micro_batches))
    packs = [plan.of_rank(rank) for rank in replicas]
    workloads = [[m.workload for m in of_rank] for of_rank in packs]
    in_pipelines = [imbalance_by_pass(*replica) for replica in zip(packs, workloads, strict=True)]
    figures: dict[str, Any] = {
        "imbalance_dp": imbalance_degree([sum(of_rank) for of_rank in workloads]),
        "imbalance_pp": float(np.mean(in_pipelines)),
    }
    divided = [
        (m.sharding, with_prefix(m.ranks, m.prefix))
        for m in plan.micro_batches
        if m.ranks is not None and not m.merged
    ]
    if divided and strategy is not None:
        times = [strategy.seconds(ranks).sum(axis=1) for _, ranks in divided]
        figures["imbalance_cp"] = float(np.mean([imbalance_degree(t) for t in times]))
        figures["sharding"] = dict(Counter(sharding for sharding, _ in divided))
    return figures
