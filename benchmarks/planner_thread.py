"""What planning ahead on a thread takes from the thread that launches kernels: both need Python's lock.

    python benchmarks/planner_thread.py

The main thread calls small operations one after the other, as a host that launches kernels does, once alone
and once while another thread plans steps and cuts one rank's share out of each micro-batch. "lost" is how
much longer the operations took than alone, for each step that was planned meanwhile: what a step on a device
loses at the most, if the host is never ahead of the device. Documents of lognormal lengths, window 131072,
CP 2.
"""

from __future__ import annotations

import threading
import time

import click
import numpy as np
import torch
from common import WINDOW
from rich.console import Console
from rich.table import Table

from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.job import Job
from wlb_titan.packing import POLICIES
from wlb_titan.plan import LENGTH
from wlb_titan.planner import Planner
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

from wlb_titan.runtime.data.inputs import rank_item  # noqa: E402

REPLICA = 4  # micro-batches of a data-parallel rank


def prepare(job: Job, planner: Planner) -> None:
    """What the loader's thread does for a step, but for reading tokens."""
    for m in planner.next(sharded=[0]).of_rank(0):
        tokens = np.zeros(m.length, dtype=np.int64)
        rank_item(tokens, tokens, tokens, m.documents[:, LENGTH], job.strategy, m.ranks, 0)


def operations() -> float:
    """Seconds of 2,000 small ones."""
    x = torch.zeros(8)
    begin = time.perf_counter()
    for _ in range(2000):
        x.add_(1.0)
    return time.perf_counter() - begin


def lost(job: Job, planner: Planner, seconds: float) -> float:
    """Seconds that the operations of this thread lose to each step that another one plans."""
    quiet = min(operations() for _ in range(50))
    stopped, steps = threading.Event(), 0

    def plan_ahead() -> None:
        nonlocal steps
        while not stopped.is_set():
            prepare(job, planner)
            steps += 1

    planning = threading.Thread(target=plan_ahead)
    planning.start()
    rounds, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        operations()
        rounds += 1
    took = time.perf_counter() - begin
    stopped.set()
    planning.join()
    return (took - rounds * quiet) / max(steps, 1)


@click.command()
@click.option("--seconds", default=5.0, show_default=True, help="For which each case is measured.")
def main(seconds: float) -> None:
    """Prints milliseconds a step for each packing policy and size of job."""
    torch.set_num_threads(1)
    lengths = np.random.default_rng(0).lognormal(np.log(2000), 1.6, size=400_000)
    documents = Documents(lengths=np.clip(lengths, 16, WINDOW).astype(np.int64))
    table = Table("policy", "micro-batches", "planning alone, ms a step", "lost, ms a step")
    for policy in ("plain", "wlb", "wlb_lazy"):
        for micro_batches in (4, 64, 2048):
            job = Job(
                window=WINDOW,
                micro_batches=micro_batches,
                degrees=Degrees(shard=micro_batches // REPLICA, context=2),
                multiple=8,
                packing=POLICIES.configure(policy, cost_model="quadratic:1,5e4"),
                sharding=STRATEGIES.configure("hybrid"),
                memory_unknown="a planner",  # so that two windows are the bound
            )
            planner = job.planner(documents)
            prepare(job, planner)
            begin = time.perf_counter()
            prepare(job, planner)
            alone = time.perf_counter() - begin
            milliseconds = 1e3 * np.array([alone, lost(job, planner, seconds)])
            table.add_row(policy, str(micro_batches), *(f"{each:.1f}" for each in milliseconds))
    Console().print(table)


if __name__ == "__main__":
    main()
