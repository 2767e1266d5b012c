"""Keys behind attention, by groups of heads, and what else could hide or spare their exchange.

    python benchmarks/groups.py

For files of train_configs/ on the lengths `paper`, plans of each policy are predicted again with 1, 2 and 4
groups of heads, with the fastest number of each micro-batch ("auto"), and with an exchange that takes
no time ("none"). For slices there are three more ways, none of which is built:

- "layers": two slices take turns layer by layer, so that keys travel behind products and attention of the
  other, whatever these leave.
- "pairs": the same, with half as many slices: as two run side by side, a pipeline fills and drains by pairs.
- "ends": the last slice of a document, whose keys no later slice needs, is divided like a whole document.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
from common import save, show
from predicted import documents_of, job_of_file

from wlb_titan.errors import PlanError
from wlb_titan.job import Job, Policy
from wlb_titan.layers.groups import grouped
from wlb_titan.packing.predicted import pass_seconds, passing
from wlb_titan.plan import PREFIX, TOTAL, MicroBatch, Plan, Slices
from wlb_titan.simulator.choice import Scenario
from wlb_titan.simulator.measured import MeasuredPasses
from wlb_titan.simulator.step import simulate

STEPS = 8
TUNED = (
    *("--parallelism.tensor_parallel_degree", "2", "--parallelism.context_parallel_degree", "8"),
    *("--parallelism.pipeline_parallel_degree", "1", "--parallelism.data_parallel_shard_degree", "4"),
    *("--training.local_batch_size", "1", "--training.global_batch_size", "4"),
)
JOBS = {
    "7B, TP 2 x CP 8 x DP 4": ("llama2_7b_128k", TUNED),
    "7B, TP 8 x CP 2 x PP 4": ("llama2_7b_128k", ()),
    "30B, TP 8 x CP 4 x PP 4": ("llama2_30b_128k", ()),
    "70B, TP 16 x CP 4 x PP 4": ("llama2_70b_128k", ()),
    "8B, TP 4 x CP 4 x DP 2": ("llama3_8b_128k", ()),
}
POLICIES = tuple(map(Policy.parse, ("plain", "wlb_lazy/hybrid/best", "slim/hybrid")))
COLUMNS = {"job": "{job}", "policy": "`{policy}`"}
COLUMNS |= {way: f"{{{way}}}" for way in ("one", "two", "four", "auto", "none", "layers", "pairs", "ends")}


def in_groups(job: Job, plans: list[Plan], groups: Any) -> float:
    own = replace(job, context=replace(job.context, groups=groups))
    planned = [replace(p, micro_batches=tuple(grouped(own, p.micro_batches))) for p in plans]
    return simulate(own, planned).mfu


class Ending(MicroBatch):
    """One whose documents are whole for the ranks where no later micro-batch has the rest."""

    __slots__ = ()

    @classmethod
    def of(cls, other: MicroBatch) -> Ending:
        return cls(**{field.name: getattr(other, field.name) for field in fields(other)})

    @property
    def elsewhere(self) -> Slices | None:
        if self.slices is None:
            return None
        end = self.slices[:, PREFIX] + self.lengths
        return Slices(self.slices[:, PREFIX], end < self.slices[:, TOTAL])


def otherwise(job: Job, plans: list[Plan], way: str) -> float:
    """MFU if passes take what `way` makes of them."""
    optimizer = simulate(job, plans).optimizer
    changed = []
    for plan, seconds in zip(plans, optimizer.tolist(), strict=True):
        micro_batches = list(plan.micro_batches)
        passes, layers = pass_seconds(job, micro_batches), np.array(job.layers, dtype=np.float64)[:, None]
        own = passing(micro_batches, job)
        exchange = np.stack([own.moving + own.latency] * 2)
        exchange[1] += own.repeated * job.repeating.repeats_moves
        attention = np.stack([own.forward, own.backward])
        if way == "ends":
            ends = passing(job.sharded(list(map(Ending.of, micro_batches))), job)
            left = np.stack([ends.moving + ends.latency] * 2)
            left[1] += ends.repeated * job.repeating.repeats_moves
            added = np.stack([ends.forward, ends.backward]) - attention + (left - exchange)[:, None]
            passes[:2] += layers * np.minimum(added, 0)  # each micro-batch takes the better
        if way == "none":
            passes[:2] -= layers * exchange[:, None]
        if way == "layers":
            beside = passes[:2] / np.maximum(layers, 1) - exchange[:, None]
            passes[:2] -= layers * np.minimum(beside, exchange[:, None])
        changed.append(MeasuredPasses(passes, seconds, job))
    return simulate(job, plans, changed).mfu


def rows() -> Iterator[dict[str, Any]]:
    documents = documents_of("paper")
    for name, (file, words) in JOBS.items():
        scenario = Scenario(job_of_file(file, *words), documents)
        for policy in POLICIES:
            try:
                plans, job = scenario.plans(policy, STEPS), scenario.under(policy)
            except PlanError as error:  # it does not fit
                print(f"{name}, {policy}: {error}", file=sys.stderr)
                continue
            keys = job.latency.heads // job.latency.group
            found: dict[str, Any] = {"one": scenario.simulate(policy, plans).mfu}
            for way, groups in (("two", 2), ("four", 4), ("auto", "auto")):
                possible = groups == "auto" or keys % groups == 0
                found[way] = in_groups(job, plans, groups) if possible else None
            found["none"] = otherwise(job, plans, "none")
            found |= {"layers": None, "pairs": None, "ends": None}
            if policy.packing == "slim":
                found |= {way: otherwise(job, plans, way) for way in ("layers", "ends")}
                packing = replace(job.packing, micropacks=max(len(plans[0].of_rank(0)) // 2, len(job.layers)))
                half = replace(scenario, job=replace(job, packing=packing))
                found["pairs"] = otherwise(half.under(policy), half.plans(policy, STEPS), "layers")
            yield {"job": name, "policy": str(policy), **found}


def main() -> None:
    shown: list[dict[str, Any]] = []

    def texts() -> Iterator[dict[str, str]]:
        for row in rows():
            shown.append(row)
            yield {key: f"{100 * of:.1f}" if isinstance(of, float) else of or "-" for key, of in row.items()}

    print("MFU, %\n")
    show(COLUMNS, texts())
    save("groups", {"steps": STEPS, "rows": shown})


if __name__ == "__main__":
    main()
