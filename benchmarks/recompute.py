"""What it is worth to recompute as needed: big jobs under one kind for all layers, and under a mix.

    python benchmarks/recompute.py

For each file of README's table, two collections of documents and three policies: predicted MFU with each kind
of recomputation in all layers, where that fits, and with the mix that the planner chooses (`as_needed`); the
peak, the processor time that a step's choice takes on the pipeline rank where it takes longest, and the gain
over `selective`, torchtitan's usual setting. The rows are written to benchmarks/results/cpu/recompute.json.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from math import isnan, nan
from typing import Any

import numpy as np
from common import save, show
from predicted import BALANCED, FILES, PLAIN, PYTHON, documents_of, job_of_file

from wlb_titan.errors import PlanError
from wlb_titan.job import Job, Policy
from wlb_titan.layers.recompute import KINDS
from wlb_titan.memory.rank import GIB
from wlb_titan.packing.predicted import with_mixes
from wlb_titan.plan import Plan
from wlb_titan.simulator.choice import Scenario
from wlb_titan.simulator.step import simulate

STEPS = 6
SINGLE = [kind.name for kind in KINDS]
COLUMNS = {
    "file": "{file}",
    "documents": "{documents}",
    "policy": "{policy}",
    **{name: f"{{{name}:.2%}}" for name in SINGLE},
    "as needed": "{as_needed:.2%}",
    "over best": "{over_best:.3f}",
    "over selective": "{over_selective:.3f}",
    "peak GiB": "{peak_gib:.1f}",
    "room": "{room_gib:.1f}",
    "not none": "{repeated:.1%}",
    "ms": "{milliseconds:.1f}",
}


def under(job: Job, **memory: Any) -> Job:
    return replace(job, memory=replace(job.memory, **memory))


def choosing(job: Job, plan: Plan) -> float:
    """Most processor seconds that a pipeline rank takes to choose its mix."""
    flow = None if plan.flows is None else plan.flows[0]
    seconds, unmixed = [], [replace(m, mix=None) for m in plan.of_rank(0)]
    for rank in range(job.shape.ranks):
        begin = time.process_time()
        with_mixes(job.fitting, unmixed, flow, [rank])
        seconds.append(time.process_time() - begin)
    return max(seconds)


def row(job: Job, documents: Any, policy: Policy) -> dict[str, Any]:
    scenario = Scenario(under(job, as_needed=True), documents)
    plans = scenario.plans(policy, STEPS)
    mixed = scenario.under(policy)
    found = simulate(mixed, plans)
    result: dict[str, Any] = {
        "policy": str(policy),
        "as_needed": found.mfu,
        "fits": found.fits,
        "peak_gib": found.peak_memory.total / GIB,
        "room_gib": mixed.fitting.usable / GIB,
        "milliseconds": 1e3 * float(np.median([choosing(mixed, plan) for plan in plans[:3]])),
    }
    result["shares"] = {kind: round(share, 4) for kind, share in found.kinds.items()}
    result["repeated"] = 1 - result["shares"]["none"]
    for kind in SINGLE:  # the same plans, so that nothing else differs
        alone = under(mixed, as_needed=False, checkpointing=kind)
        same = [replace(p, micro_batches=tuple(replace(m, mix=None) for m in p.micro_batches)) for p in plans]
        try:
            single = simulate(alone, same)
        except PlanError:
            result[kind] = nan
            continue
        result[kind] = single.mfu if single.fits else nan
    result["over_best"] = found.mfu / np.nanmax([*(result[kind] for kind in SINGLE), 0])
    result["over_selective"] = found.mfu / result["selective"]
    return result


def rows() -> Iterator[dict[str, Any]]:
    for file in FILES:
        job = job_of_file(file)
        for documents in ("paper", PYTHON):
            for policy in (PLAIN, *BALANCED):
                facts = {"file": file, "documents": documents}
                yield facts | row(job, documents_of(documents), policy)


def main() -> None:
    found = show(COLUMNS, rows())
    gains = [row["over_selective"] for row in found if not isnan(row["over_selective"])]
    print(f"median gain over selective: {np.median(gains):.3f}")
    save("recompute", found)


if __name__ == "__main__":
    main()
