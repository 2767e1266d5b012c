"""What planning takes of a step: processor seconds of one rank's plans, of `simulate` and of its `--search`.

    python benchmarks/planning.py [FILES]

For each file of train_configs/ and the balanced policies, on the lengths `paper`: the processor seconds in
which a rank plans each of ten steps, as its loader does, after one to warm up, beside the step's predicted
seconds. The planner runs beside training, in a thread that holds Python's lock while kernels are launched.
`simulate` is the planning and prediction of three policies, as the command's, and `search` that of the
tutorial; neither counts the import of torch. Results are written to results/cpu/planning.json.

Without FILES, what planning takes from the thread that launches kernels, as both need Python's lock: that
thread calls small operations one after the other, once alone and once while another thread plans steps and
cuts one rank's share out of each micro-batch. "lost" is how much longer they took than alone, for each step
that was planned meanwhile: what a step on a device loses at the most, if the host is never ahead of it.
Documents of lognormal lengths, window 131072, CP 2.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import torch
from common import machine, save, show
from predicted import BALANCED, PLAIN, ROOT, job_of_file

from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import NAMED
from wlb_titan.errors import PlanError
from wlb_titan.job import Job, Policy
from wlb_titan.packing import POLICIES
from wlb_titan.planner import Planner
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator
from wlb_titan.simulator.choice import Scenario
from wlb_titan.simulator.search import search
from wlb_titan.simulator.step import simulate

DOCUMENTS = Documents(lengths=NAMED["paper"].draw(), seed=None)
STEPS = 10
SIMULATED = 20  # steps, the default of `simulate`
SEARCHED, GPUS = "llama2_7b_128k", 64  # as in docs/tutorial.md

COLUMNS = {
    "file": "{file}",
    "policy": "`{policy}`",
    "planned, ms": "{median_ms:.1f}",
    "worst": "{worst_ms:.1f}",
    "of the step": "{median_share:.1%}",
    "worst of its step": "{worst_share:.1%}",
    "simulate, s": "{simulate_seconds:.1f}",
}
WINDOW = 131072
REPLICA = 4  # micro-batches of a data-parallel rank
SECONDS = 5.0  # for which each case of planning ahead is measured
AHEAD = {
    "policy": "{policy}",
    "micro-batches": "{micro_batches}",
    "planning alone, ms a step": "{alone:.1f}",
    "lost, ms a step": "{lost:.1f}",
}


def processor_seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def rows(files: list[str]) -> Iterator[dict[str, Any]]:
    for file in files:
        base = job_of_file(file)
        simulated = processor_seconds(lambda base=base: simulate_three(base))
        for policy in BALANCED:
            with suppress(PlanError):  # a document of the window does not fit in slices
                row = {"file": file, "policy": str(policy), "simulate_seconds": simulated}
                yield row | planned(base.under(policy))


def simulate_three(base: Job) -> None:
    scenario = Scenario(base, DOCUMENTS)
    for policy in (PLAIN, *BALANCED):
        with suppress(PlanError):
            scenario.predict(policy, SIMULATED)


def planned(job: Job) -> dict[str, Any]:
    """Of a rank of the first replica and pipeline stage."""
    planner, seconds = job.planner(DOCUMENTS), []
    planner.next([0], [0])
    for _ in range(STEPS):
        seconds.append(processor_seconds(lambda: planner.next([0], [0])))
    predicted = simulate(job, job.plans(DOCUMENTS, STEPS, after=1)).seconds
    shares = np.array(seconds) / predicted
    return {
        "median_ms": 1e3 * float(np.median(seconds)),
        "worst_ms": 1e3 * max(seconds),
        "median_share": float(np.median(shares)),
        "worst_share": float(shares.max()),
        "predicted_seconds": predicted.tolist(),
    }


def search_of_tutorial() -> None:
    scenario = Scenario(job_of_file(SEARCHED), DOCUMENTS)
    search(scenario, GPUS, [Policy.parse("plain/per_sequence"), BALANCED[0]], STEPS)


def prepare(job: Job, planner: Planner) -> None:
    """What the loader's thread does for a step, but for reading tokens."""
    from wlb_titan.runtime.dataloader import Item

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


def ahead(policy: str, micro_batches: int, documents: Documents) -> dict[str, Any]:
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


def main() -> None:
    use_cpu_without_accelerator()
    files = sys.argv[1:] or sorted(path.stem for path in (ROOT / "train_configs").glob("*.toml"))
    found = show(COLUMNS, rows(files))
    searched = processor_seconds(search_of_tutorial)
    print(f"search: {searched:.1f} s of processor")
    if not sys.argv[1:]:
        torch.set_num_threads(1)
        lengths = np.random.default_rng(0).lognormal(np.log(2000), 1.6, size=400_000)
        documents = Documents(lengths=np.clip(lengths, 16, WINDOW).astype(np.int64))
        cases = product(("plain", "wlb", "wlb_lazy"), (4, 64, 2048))
        beside = show(AHEAD, (ahead(*case, documents) for case in cases))
        save("planning", machine() | {"rows": found, "search_seconds": searched, "ahead": beside})


if __name__ == "__main__":
    main()
