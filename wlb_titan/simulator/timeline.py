"""The predicted timeline of one step: the passes of each pipeline rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from wlb_titan.job import Job
from wlb_titan.packing.slim.slices import kind
from wlb_titan.plan import MicroBatch, Plan
from wlb_titan.simulator.replicas import step_ends, step_passes
from wlb_titan.simulator.trace import Span

NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def step_timeline(job: Job, plan: Plan, name: str = "step", dp_rank: int | None = None) -> list[Span]:
    """A span for each pass of one replica, by default the slowest, on its pipeline rank's track."""
    passes = step_passes(job, plan)
    of_replicas = step_ends(job, plan, passes)
    if dp_rank is None:
        dp_rank = int(np.argmax([ends.max(axis=0).sum() for _, ends in of_replicas]))
    graph, ends = of_replicas[dp_rank]
    begins = np.cumsum(ends.max(axis=0)) - ends.max(axis=0)
    times, micro_batches = passes.of(dp_rank), plan.of_rank(dp_rank)
    n = len(micro_batches) // passes.runs
    spans = []
    for rank in range(job.degrees.pipeline):
        numbers = [i for i, a in enumerate(graph.actions) if job.shape.rank_of(a.stage) == rank]
        for run, begin in enumerate(begins.tolist()):
            for number in numbers:
                action, end = graph.actions[number], float(ends[number, run])
                seconds = float(times.of(action)[run])
                place = run * n + action.place
                facts = {"pass": NAMES[action.kind], "stage": action.stage, **_facts(micro_batches[place])}
                start = begin + end - seconds
                spans.append(Span(name, f"pp {rank}", f"{action.kind}{place}", start, seconds, facts))
    return spans


def _facts(micro_batch: MicroBatch) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "tokens": micro_batch.length,
        "documents": len(micro_batch.documents),
        "sharding": micro_batch.sharding or "none",
    }
    if micro_batch.slices is not None:
        facts["MicroPack"] = kind(micro_batch)
        lengths = micro_batch.lengths.tolist()
        if slices := ", ".join(
            f"{prefix}-{prefix + length} of {total}"
            for length, (prefix, total) in zip(lengths, micro_batch.slices.tolist(), strict=True)
            if total > length
        ):
            facts["slice"] = slices
    if merged := micro_batch.merged:
        facts["merged"] = f"dp {merged[0]}-{merged[-1]}"
    return facts
