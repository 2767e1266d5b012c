"""What context parallelism makes of planned micro-batches, for `wlb-titan plan`: a table and a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import rich.box
from numpy.typing import NDArray
from rich.table import Table

from wlb_titan.context import STRATEGIES, after
from wlb_titan.cost.attention_latency import slowest
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.job import Job
from wlb_titan.plan import LENGTH, MicroBatch, imbalance_degree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 200  # micro-batches in table and heat map; more would be thinner than a pixel


class RankTimes(NamedTuple):
    """What one policy makes of micro-batches.

    Attributes:
        policy: as in [wlb.sharding].
        chosen: per micro-batch how it is sharded in the end.
        seconds: float64 (micro-batches, ranks, 2), predicted forward and backward attention time of a layer.
        exchange: float64 (micro-batches,), seconds of a layer's collectives in both passes and repeated ones.
        received: float64 (micro-batches,), bytes that a rank receives in these.
    """

    policy: str
    chosen: list[str]
    seconds: NDArray[np.float64]
    exchange: NDArray[np.float64]
    received: NDArray[np.float64]

    @property
    def slowest(self) -> float:
        """Mean over micro-batches of the time that a layer waits for its slowest rank, in seconds."""
        return float(np.mean([slowest(seconds) for seconds in self.seconds]))

    @property
    def layer(self) -> float:
        """The same with the collectives, of which nothing is hidden."""
        return self.slowest + float(self.exchange.mean())

    @property
    def imbalances(self) -> NDArray[np.float64]:
        """float64 (micro-batches,), slowest over mean rank."""
        return np.array([imbalance_degree(seconds.sum(axis=1)) for seconds in self.seconds])


def rank_times(micro_batches: Sequence[MicroBatch], job: Job) -> list[RankTimes]:
    """Predicts all sharding policies on the same micro-batches that the job's heads and lengths allow.

    Args:
        micro_batches: planned; their own sharding is not looked at.
        job: with context parallelism.
    """
    result = []
    for policy in STRATEGIES.candidates:
        try:
            under = replace(job, sharding=job.sharding.named(policy))
            strategy = under.strategy
            assert strategy is not None
            shardings = [
                strategy.shard(m.documents[:, LENGTH], m.length, slices=m.elsewhere) for m in micro_batches
            ]
        except PlanError:
            continue
        seconds = np.array(
            [
                strategy.seconds(after(sharding, m.prefix))
                for (_, sharding), m in zip(shardings, micro_batches, strict=True)
            ]
        )
        travelling = [
            strategy.travelling(sharding, m.length, m.elsewhere)
            for (_, sharding), m in zip(shardings, micro_batches, strict=True)
        ]
        exchange = np.array([under.exchanging.in_all_passes(tokens) for tokens in travelling])
        result.append(RankTimes(policy, [name for name, _ in shardings], seconds, *exchange.T))
    return result


def planned_rank_times(job: Job, documents: Documents, steps: int) -> list[RankTimes]:
    """All sharding policies on the first `SHOWN` micro-batches that the job makes in so many steps, without
    those that data-parallel ranks share.

    Raises:
        PlanError: a micro-batch cannot be shared by the ranks.
    """
    planner = job.planner(documents)
    micro_batches: list[MicroBatch] = []
    for _ in range(min(steps, -(-SHOWN // job.micro_batches))):
        micro_batches += [m for m in planner.next().micro_batches if not m.merged]
    return rank_times(micro_batches[:SHOWN], job)


def rank_table(times: Sequence[RankTimes], job: Job) -> Table:
    """One row a policy: the slowest rank's attention and the collectives of a layer, what a rank receives in
    a step, the ranks' imbalance, and what was chosen how often."""
    table = Table(
        title=f"Context parallelism: attention of a layer by {job.latency.source}", box=rich.box.SIMPLE_HEAD
    )
    each = max(job.layers) * job.chunks * job.replica_micro_batches  # passes of layers on a rank in a step
    table.add_column("sharding", no_wrap=True)
    for heading in ("slowest rank", "exchange", "received", "speedup", "imbalance", "p95", "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("chosen")
    base = times[0].layer
    for one in times:
        imbalances = one.imbalances
        shares = {name: one.chosen.count(name) / len(one.chosen) for name in dict.fromkeys(one.chosen)}
        table.add_row(
            one.policy,
            f"{one.slowest * 1e3:.3f} ms",
            f"{one.exchange.mean() * 1e3:.3f} ms",
            f"{one.received.mean() * each / 1e9:.2f} GB",
            f"{base / one.layer:.3f}x",
            f"{imbalances.mean():.3f}",
            f"{np.quantile(imbalances, 0.95):.3f}",
            f"{imbalances.max():.3f}",
            ", ".join(f"{name} {share:.0%}" for name, share in shares.items()),
        )
    return table


def rank_heat_map(times: Sequence[RankTimes]) -> Figure:
    """Ranks x micro-batches for each policy; the colour is a rank's time over the micro-batch's mean.

    An even colour is balance. All policies share one scale, so that they can be compared by eye.
    """
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 1.3 * len(times)), layout="constrained")
    axes = figure.subplots(len(times), 1, sharex=True, squeeze=False)[:, 0]
    relative = [one.seconds.sum(axis=2) for one in times]
    relative = [(seconds / seconds.mean(axis=1, keepdims=True)).T for seconds in relative]
    low, high = (float(find([find(image) for image in relative])) for find in (np.min, np.max))
    scale = TwoSlopeNorm(1.0, vmin=min(low, 0.95), vmax=max(high, 1.05))
    for axis, one, image in zip(axes, times, relative, strict=True):
        drawn = axis.imshow(image, aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=scale)
        axis.set_title(f"{one.policy}: slowest rank {one.slowest * 1e3:.2f} ms on average", fontsize=10)
        axis.set_ylabel("rank")
        axis.set_yticks(range(len(image)) if len(image) <= 8 else [0, len(image) - 1])
    axes[-1].set_xlabel("micro-batch")
    figure.colorbar(drawn, ax=list(axes), label="attention time / mean of the ranks")
    return figure
