"""The predicted timeline of one step: the passes of each pipeline rank, and its memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.job import Job
from wlb_titan.memory.rank import SliceCache
from wlb_titan.packing.predicted import pack_sizes
from wlb_titan.packing.slim.slices import kind
from wlb_titan.plan import Action, MicroBatch, Plan
from wlb_titan.simulator.measured import MeasuredPasses
from wlb_titan.simulator.replicas import step_ends, step_passes
from wlb_titan.simulator.trace import MEASURED, Span

NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Activations of one pipeline rank over a step."""

    rank: int
    seconds: Floats  # (actions,), when each of its actions ends
    bytes_: Floats  # (actions,), that it holds from then on


Step = tuple[list[Span], list[MemoryCurve]]


def step_timeline(
    job: Job,
    plan: Plan,
    name: str = "step",
    dp_rank: int | None = None,
    measured: MeasuredPasses | None = None,
) -> Step:
    """A span for each pass of one data-parallel replica, by default the slowest, on its pipeline rank's
    track, and ranks' memory. `measured` passes replace predicted ones; those of ranks that ran say so."""
    passes = step_passes(job, plan, measured)
    of_replicas = step_ends(job, plan, passes)
    if dp_rank is None:
        dp_rank = int(np.argmax([ends.max(axis=0).sum() for _, ends in of_replicas]))
    graph, ends = of_replicas[dp_rank]
    begins = np.cumsum(ends.max(axis=0)) - ends.max(axis=0)
    times, micro_batches = passes.of(dp_rank), plan.of_rank(dp_rank)
    n = len(micro_batches) // passes.runs
    known = None if measured is None else measured.known[:, dp_rank * len(micro_batches) :]
    spans, curves = [], []
    for rank in range(job.degrees.pipeline):
        numbers = [i for i, a in enumerate(graph.actions) if job.shape.rank_of(a.stage) == rank]
        actions = [graph.actions[i] for i in numbers]
        for run, begin in enumerate(begins.tolist()):
            for action, end in zip(actions, ends[numbers, run].tolist(), strict=True):
                seconds = float(times.of(action)[run])
                place = run * n + action.place
                facts: dict[str, Any] = {"pass": NAMES[action.kind], "stage": action.stage}
                if known is not None:
                    facts["time"] = MEASURED if known[action.stage, place] else "of a like pass"
                facts |= _facts(micro_batches[place])
                start = begin + end - seconds
                spans.append(Span(name, f"pp {rank}", f"{action.kind}{place}", start, seconds, facts))
        bytes_ = [_activations(job, actions, micro_batches[run * n :][:n]) for run in range(passes.runs)]
        seconds_of_all = (begins + ends[numbers]).T.ravel()
        curves.append(MemoryCurve(rank, np.append(0.0, seconds_of_all), np.append(0.0, np.ravel(bytes_))))
    return spans, curves


def _activations(job: Job, actions: Sequence[Action], micro_batches: Sequence[MicroBatch]) -> list[float]:
    """Bytes that a pipeline rank keeps after each of its actions in one run."""
    memory, packs = job.packing.rank_memory, pack_sizes(job, micro_batches)
    layers, cache = memory.kept_layers(job.layers), SliceCache(job.token_bytes, job.layers)
    live, result = 0.0, []
    for action in actions:
        _, sharers, keys, slices = pack = packs[action.place]
        tokens = pack.length * sharers
        kept = memory.layer_bytes(job.token_bytes_of(sharers, keys)) * tokens * layers[action.stage]
        if action.kind == "F":
            live += kept
        elif action.kind != "I":  # whose weights' gradients need the activations still
            live -= kept
        cache.begin(action, slices, tokens)
        cache.end(action, slices)
        result.append(live + cache.bytes_)
    return result


def _facts(micro_batch: MicroBatch) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "tokens": micro_batch.length,
        "documents": len(micro_batch.documents),
        "sharding": micro_batch.sharding or "none",
        **_slices_of(micro_batch),
    }
    if merged := micro_batch.merged:
        facts["merged"] = f"dp {merged[0]}-{merged[-1]}"
    return facts


def _slices_of(micro_batch: MicroBatch) -> dict[str, Any]:
    if micro_batch.slices is None:
        return {}
    lengths = micro_batch.lengths
    state = {"MicroPack": kind(micro_batch)}
    slices = ", ".join(
        f"{prefix}-{prefix + length} of {total}"
        for length, (prefix, total) in zip(lengths.tolist(), micro_batch.slices.tolist(), strict=True)
        if total > length
    )
    return state | ({"slice": slices} if slices else {})
