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
from itertools import product
from typing import Any

import numpy as np
import torch
from common import show

from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.job import Job
from wlb_titan.packing import POLICIES
from wlb_titan.planner import Planner
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

from wlb_titan.runtime.dataloader import Item  # noqa: E402

WINDOW = 131072
REPLICA = 4  # micro-batches of a data-parallel rank
SECONDS = 5.0  # for which each case is measured


def prepare(job: Job, planner: Planner) -> None:
    """What the loader's thread does for a step, but for reading tokens."""
    for m in planner.next(sharded=[0]).of_rank(0):
        tokens = np.zeros(m.length, dtype=np.int64)
        Item.of(m, job, 0, tokens, tokens, tokens)


def operations() -> float:
    """Seconds of 2,000 small ones."""
    x = torch.zeros(8)
    begin = time.perf_counter()
    for _ in range(2000):
        x.add_(1.0)
    return time.perf_counter() - begin


def lost(job: Job, planner: Planner) -> float:
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
    while time.perf_counter() - begin < SECONDS:
        operations()
        rounds += 1
    took = time.perf_counter() - begin
    stopped.set()
    planning.join()
    return (took - rounds * quiet) / max(steps, 1)


def measured(policy: str, micro_batches: int, documents: Documents) -> dict[str, Any]:
    """Milliseconds of a step that is planned alone, and lost to one that is planned ahead."""
    job = Job(
        window=WINDOW,
        micro_batches=micro_batches,
        degrees=Degrees(shard=micro_batches // REPLICA, context=2),
        multiple=8,
        packing=POLICIES.configure(policy, cost_model="quadratic:1,5e4"),
        context=STRATEGIES.configure("hybrid"),
        memory_unknown="a planner",  # so that two windows are the bound
    )
    planner = job.planner(documents)
    prepare(job, planner)
    begin = time.perf_counter()
    prepare(job, planner)
    alone = time.perf_counter() - begin
    took = {"alone": 1e3 * alone, "lost": 1e3 * lost(job, planner)}
    return {"policy": policy, "micro_batches": micro_batches, **took}


COLUMNS = {
    "policy": "{policy}",
    "micro-batches": "{micro_batches}",
    "planning alone, ms a step": "{alone:.1f}",
    "lost, ms a step": "{lost:.1f}",
}


def main() -> None:
    torch.set_num_threads(1)
    lengths = np.random.default_rng(0).lognormal(np.log(2000), 1.6, size=400_000)
    documents = Documents(lengths=np.clip(lengths, 16, WINDOW).astype(np.int64))
    cases = product(("plain", "wlb", "wlb_lazy"), (4, 64, 2048))
    show(COLUMNS, (measured(*case, documents) for case in cases))


if __name__ == "__main__":
    main()
