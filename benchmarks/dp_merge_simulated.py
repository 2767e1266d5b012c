"""What sharing a dominating document among data-parallel ranks is predicted to gain, under policy `slim`.

    python benchmarks/dp_merge_simulated.py

Seconds of a step in simulation, on the WLB-LLM paper's cluster (h100_roce), of its 7B model (TP 8, CP 2, PP
4) with full activation checkpointing and one context window a data-parallel rank and step. Every step gets
one document of the whole window; the others are web pages (`wlb_titan.documents.lengths`), which in so long
a window take little besides. "imbalance" is the largest over the mean work of data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from wlb_titan.context import STRATEGIES
from wlb_titan.cost.cluster import load_cluster
from wlb_titan.cost.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import NAMED
from wlb_titan.job import Job
from wlb_titan.memory.layer import MemorySettings
from wlb_titan.packing.slim.slim import Slim
from wlb_titan.plan import Plan
from wlb_titan.simulator.step import simulate


def job_of(window: int, data_parallel: int) -> Job:
    return Job(
        window=window,
        micro_batches=data_parallel,
        degrees=Degrees(tensor=8, context=2, pipeline=4, shard=data_parallel),
        cluster=load_cluster("h100_roce"),
        multiple=8,
        memory=MemorySettings(checkpointing="full", window=window),
        packing=Slim.Config(cost_model="simulated", dp_merge=False),
        sharding=STRATEGIES.configure("per_document"),
    )


def documents(job: Job, steps: int) -> Documents:
    """As many documents as the steps take, in order: a window, and web pages up to the end of the step."""
    pages = NAMED["web"].draw(seed=0)
    lengths: list[int] = []
    first = 0
    for _ in range(steps):
        room = (job.micro_batches - 1) * job.window
        upto = first + int(np.searchsorted(np.cumsum(pages[first:]), room, side="right"))
        page = pages[first:upto].tolist()
        lengths += [job.window, *page, room - sum(page)]
        first = upto
    return Documents(lengths=np.maximum(np.array(lengths, dtype=np.int64), 1), seed=None)


def imbalance(plans: list[Plan], ranks: int) -> float:
    loads = [[sum(m.workload for m in plan.of_rank(rank)) for rank in range(ranks)] for plan in plans]
    return float(np.mean([max(own) / np.mean(own) for own in loads]))


@click.command()
@click.option("--steps", default=4, show_default=True, help="Simulated steps of each.")
def main(steps: int) -> None:
    """Prints step times of several windows and data-parallel degrees, without sharing and with."""
    table = Table("window", "DP", "dp_merge", "step, s", "speedup", "imbalance", "peak GiB", "shared by")
    for window, ranks in ((131072, 4), (262144, 4), (262144, 8), (524288, 4), (524288, 8)):
        base = 0.0
        for setting in (False, "auto"):
            job = job_of(window, ranks)
            job = replace(job, packing=replace(job.packing, dp_merge=setting))
            plans = job.plans(documents(job, steps), steps)
            found = simulate(job, plans)
            seconds = float(found.seconds.mean())
            base = base or seconds
            groups = {len(m.merged) for plan in plans for m in plan.micro_batches if m.merged}
            table.add_row(
                *(f"{window >> 10}K", str(ranks), str(setting).lower(), f"{seconds:.2f}"),
                *(f"{base / seconds:.2f}", f"{imbalance(plans, ranks):.2f}"),
                *(f"{found.peak_memory.total / 2**30:.1f}", ", ".join(map(str, sorted(groups)))),
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
