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
from rich.console import Console
from rich.table import Table

from wlb_titan.context import STRATEGIES
from wlb_titan.cost.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.job import Job
from wlb_titan.packing import POLICIES
from wlb_titan.plan import LENGTH
from wlb_titan.planner import Planner
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

from wlb_titan.runtime.data.inputs import rank_item  # noqa: E402

WINDOW = 131072
REPLICA = 4  # micro-batches of a data-parallel rank


def prepare(job: Job, planner: Planner) -> None:
    """What the loader's thread does for a step, but for reading tokens."""
    for m in planner.next(sharded=[0]).of_rank(0):
        tokens = np.zeros(m.length, dtype=np.int64)
        rank_item(tokens, tokens, tokens, m.documents[:, LENGTH], job.strategy, m.ranks, 0)


def job_of(policy: str, micro_batches: int) -> Job:
    return Job(
        window=WINDOW,
        micro_batches=micro_batches,
        degrees=Degrees(shard=micro_batches // REPLICA, context=2),
        multiple=8,
        packing=POLICIES.configure(policy, cost_model="quadratic:1,5e4"),
        sharding=STRATEGIES.configure("hybrid"),
        memory_unknown="a planner",  # so that two windows are the bound
    )


def documents() -> Documents:
    lengths = np.random.default_rng(0).lognormal(np.log(2000), 1.6, size=400_000)
    return Documents(lengths=np.clip(lengths, 16, WINDOW).astype(np.int64))


def operations(number: int) -> float:
    """Seconds of so many small operations."""
    x = torch.zeros(8)
    begin = time.perf_counter()
    for _ in range(number):
        x.add_(1.0)
    return time.perf_counter() - begin


class Planning(threading.Thread):
    """Plans one step after the other until it is stopped."""

    def __init__(self, job: Job, planner: Planner) -> None:
        super().__init__()
        self.steps = 0
        self._job, self._planner = job, planner
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            prepare(self._job, self._planner)
            self.steps += 1

    def stop(self) -> None:
        self._stopped.set()
        self.join()


@click.command()
@click.option("--seconds", default=5.0, show_default=True, help="For which each case is measured.")
def main(seconds: float) -> None:
    """Prints milliseconds a step for each packing policy and size of job."""
    torch.set_num_threads(1)
    table = Table("policy", "micro-batches", "planning alone, ms a step", "lost, ms a step")
    batch = 2000
    for policy in ("plain", "wlb", "wlb_lazy"):
        for micro_batches in (4, 64, 2048):
            job = job_of(policy, micro_batches)
            planner = job.planner(documents())
            prepare(job, planner)
            begin = time.perf_counter()
            prepare(job, planner)
            alone = time.perf_counter() - begin
            quiet = min(operations(batch) for _ in range(50))
            planning = Planning(job, planner)
            planning.start()
            rounds, begin = 0, time.perf_counter()
            while time.perf_counter() - begin < seconds:
                operations(batch)
                rounds += 1
            took = time.perf_counter() - begin
            planning.stop()
            lost = (took - rounds * quiet) / max(planning.steps, 1)
            table.add_row(policy, str(micro_batches), f"{1e3 * alone:.1f}", f"{1e3 * lost:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
