"""Planned micro-batches under context parallelism: the table of sharding policies of `wlb-titan plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.context import STRATEGIES
from wlb_titan.cost.attention_latency import slowest
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.job import Job
from wlb_titan.packing.predicted import attention_seconds, travelling
from wlb_titan.plan import LENGTH, MicroBatch, imbalance_degree

SHARDED = 200  # micro-batches that are compared


class RankTimes(NamedTuple):
    """What one sharding policy makes of micro-batches.

    Attributes:
        chosen: how each micro-batch is sharded in the end.
        seconds: float64 (micro-batches, ranks, 2), predicted forward and backward attention time of a layer.
        exchange: float64 (micro-batches,), seconds of a layer's collectives in both passes and repeated ones.
        received: float64 (micro-batches,), bytes that a rank receives in these.
    """

    policy: str
    chosen: list[str]
    seconds: Floats
    exchange: Floats
    received: Floats

    @property
    def slowest(self) -> float:
        """Mean over micro-batches of the time that a layer waits for its slowest rank, in seconds."""
        return float(np.mean([slowest(seconds) for seconds in self.seconds]))

    @property
    def layer(self) -> float:
        """Seconds with the collectives, of which nothing is hidden."""
        return self.slowest + float(self.exchange.mean())

    @property
    def imbalances(self) -> Floats:
        """float64 (micro-batches,), slowest over mean rank."""
        return np.array([imbalance_degree(seconds.sum(axis=1)) for seconds in self.seconds])


def sharded_micro_batches(job: Job, documents: Documents, steps: int) -> list[MicroBatch]:
    """The first `SHARDED` micro-batches of these steps, without those that data-parallel ranks share."""
    plans = job.plans(documents, min(steps, -(-SHARDED // job.micro_batches)))
    return [m for plan in plans for m in plan.micro_batches if not m.merged][:SHARDED]


def rank_times(micro_batches: Sequence[MicroBatch], job: Job) -> list[RankTimes]:
    """Predicts all sharding policies on the same micro-batches that the job's heads and lengths allow."""
    result = []
    for policy in STRATEGIES.candidates:
        try:
            under = replace(job, sharding=job.sharding.named(policy))
            packs = [_sharded(m, under) for m in micro_batches]
        except PlanError:
            continue
        seconds = np.array([attention_seconds(m, under) for m in packs])
        exchange = np.array([under.exchanging.in_all_passes(travelling(m, under)) for m in packs])
        result.append(RankTimes(policy, [str(m.sharding) for m in packs], seconds, *exchange.T))
    return result


def _sharded(micro_batch: MicroBatch, job: Job) -> MicroBatch:
    """A micro-batch as the job's sharding policy divides it."""
    assert job.strategy is not None
    lengths = micro_batch.documents[:, LENGTH]
    name, ranks = job.strategy.shard(lengths, micro_batch.length, slices=micro_batch.elsewhere)
    return replace(micro_batch, sharding=name, ranks=tuple(ranks))


def rank_rows(times: Sequence[RankTimes], job: Job) -> list[dict[str, str]]:
    """A row for each sharding policy.

    It has the slowest rank's attention and the collectives of a layer, what a rank receives in a step, the
    ranks' imbalance, and how often which sharding was chosen.
    """
    passes = max(job.layers) * job.chunks * job.replica_micro_batches  # of layers on a rank in a step
    rows = []
    for one in times:
        imbalances = one.imbalances
        shares = {name: one.chosen.count(name) / len(one.chosen) for name in dict.fromkeys(one.chosen)}
        rows.append(
            {
                "sharding": one.policy,
                "slowest rank": f"{one.slowest * 1e3:.3f} ms",
                "exchange": f"{one.exchange.mean() * 1e3:.3f} ms",
                "received": f"{one.received.mean() * passes / 1e9:.2f} GB",
                "speedup": f"{times[0].layer / one.layer:.3f}x",
                "imbalance": f"{imbalances.mean():.3f}",
                "p95": f"{np.quantile(imbalances, 0.95):.3f}",
                "max": f"{imbalances.max():.3f}",
                "chosen": ", ".join(f"{name} {share:.0%}" for name, share in shares.items()),
            }
        )
    return rows
