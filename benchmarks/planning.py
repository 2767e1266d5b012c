"""What planning takes of a step: processor seconds of one rank's plans, of `simulate` and of its `--search`.

    python benchmarks/planning.py [FILES]

For each file of train_configs/ and the balanced policies, on the lengths `paper`: the processor seconds in
which a rank plans each of ten steps, as its loader does, after one to warm up, beside the step's predicted
seconds. The planner runs beside training, in a thread that holds Python's lock while kernels are launched.
`simulate` is the planning and prediction of three policies, as the command's, and `search` that of the
tutorial; neither counts the import of torch. Results are written to results/cpu/planning.json.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from common import machine, save, show
from predicted import BALANCED, PLAIN, ROOT

from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import NAMED
from wlb_titan.errors import PlanError
from wlb_titan.job import Job, Policy
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator
from wlb_titan.runtime.models.load import load_config
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


def job_of_file(file: str) -> Job:
    return load_config(ROOT / "train_configs" / f"{file}.toml").job


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


def main() -> None:
    use_cpu_without_accelerator()
    files = sys.argv[1:] or sorted(path.stem for path in (ROOT / "train_configs").glob("*.toml"))
    found = show(COLUMNS, rows(files))
    searched = processor_seconds(search_of_tutorial)
    print(f"search: {searched:.1f} s of processor")
    if not sys.argv[1:]:
        save("planning", machine() | {"rows": found, "search_seconds": searched})


if __name__ == "__main__":
    main()
