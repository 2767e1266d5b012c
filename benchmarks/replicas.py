"""What windows gain that are dealt out to data-parallel ranks and shared by them: docs/packing.md, `dealt`.

    python benchmarks/replicas.py [--network node]

For each file of train_configs, each distribution of lengths and 2, 4 and 16 data-parallel ranks: FLOPs a
second over `plain/per_sequence` of policies that leave the data of a step alone, of two that do not, and of a
bound: all passes of a step have the same attention, and nothing travels for it. `--network node` gives the
links between nodes the rates of those within. Written to benchmarks/results/cpu/replicas*.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
from common import save, show
from predicted import FILES, documents_of, job_of_file

from wlb_titan.job import Job, Policy
from wlb_titan.layers.passes import Loads, pass_times
from wlb_titan.memory.rank import GIB
from wlb_titan.plan import Plan
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator
from wlb_titan.simulator.measured import MeasuredPasses
from wlb_titan.simulator.step import Prediction, simulate

COLLECTIONS = ("paper", "wlbllm", "prolong")
REPLICAS = (2, 4, 16)
STEPS, WARM_UP = 10, 8
POLICIES = {
    "plain": ("plain/hybrid", {}),
    "fixed": ("fixed_greedy/hybrid/best", {}),
    "dealt": ("dealt/hybrid", {}),
    "shared_2": ("dealt/hybrid", {"sharers": 2}),
    "shared_4": ("dealt/hybrid", {"sharers": 4}),
    "wlb_lazy": ("wlb_lazy/hybrid/best", {}),
    "slim": ("slim/hybrid", {}),
}
COLUMNS = {
    "file": "{file}",
    "lengths": "{lengths}",
    "replicas": "{replicas}",
    "`plain`": "{plain:.2f}",
    "`fixed_greedy`": "{fixed:.2f}",
    "`dealt`": "{dealt:.2f}",
    "2 share": "{shared_2:.2f}",
    "4 share": "{shared_4:.2f}",
    "bound": "{bound:.2f}",
    "`wlb_lazy`": "{wlb_lazy:.2f}",
    "`slim`": "{slim:.2f}",
}


def replicated(file: str, replicas: int, in_node: bool) -> Job:
    """The file's job with as many micro-batches a data-parallel rank, on so many of them."""
    micro_batches = str(job_of_file(file).replica_micro_batches * replicas)
    words = ("--parallelism.data_parallel_shard_degree", str(replicas))
    job = job_of_file(file, *words, "--training.global_batch_size", micro_batches)
    return job.on(replace(job.cluster, network=job.cluster.node)) if in_node else job


def bound(job: Job, plans: Sequence[Plan], base: Prediction) -> Prediction:
    """The steps of `plain` with the same attention in all passes and on all ranks, and nothing moved."""

    def evened(plan: Plan, optimizer: float) -> MeasuredPasses:
        windows = len(plan.micro_batches)
        lengths = plan.document_lengths
        attention = job.latency.work(lengths, lengths).sum(axis=1) / (windows * job.degrees.context)
        none = np.zeros(windows)
        alike = Loads(none + job.window, none + attention[0], none + attention[1], none, none, none)
        times = pass_times(job, alike.in_runs(1))
        return MeasuredPasses(np.stack([each[:, 0] for each in times]), optimizer, job)

    return simulate(job, plans, [evened(*each) for each in zip(plans, base.optimizer, strict=True)])


def row(file: str, lengths: str, replicas: int, in_node: bool) -> dict[str, Any]:
    job = replicated(file, replicas, in_node)
    documents = documents_of(lengths)

    def predicted(policy: str, settings: Mapping[str, Any]) -> tuple[Job, list[Plan], Prediction]:
        under = job.under(Policy.parse(policy))
        under = replace(under, packing=replace(under.packing, **settings))
        plans = under.plans(documents, STEPS, after=WARM_UP)
        return under, plans, simulate(under, plans)

    under, plans, base = predicted("plain", {})
    found = {"bound": bound(under, plans, base)}
    for name, (policy, settings) in POLICIES.items():
        if settings.get("sharers", 1) <= replicas:
            found[name] = predicted(policy, settings)[2]
    return {
        "file": file,
        "lengths": lengths,
        "replicas": replicas,
        "shared_4": nan,
        **{name: one.flops_per_second / base.flops_per_second for name, one in found.items()},
        "peak_gib": {name: one.peak_memory.total / GIB for name, one in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=["network", "node"], default="network")
    arguments = parser.parse_args()
    use_cpu_without_accelerator()
    in_node = arguments.network == "node"
    rows = []
    for file in FILES:
        for lengths in COLLECTIONS:
            rows += show(COLUMNS, [row(file, lengths, replicas, in_node) for replicas in REPLICAS])
    rows = [{key: value for key, value in row.items() if value is not nan} for row in rows]
    save("replicas_in_node" if in_node else "replicas", {"steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
