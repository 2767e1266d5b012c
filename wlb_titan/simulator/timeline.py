"""What runs when in one step, as predicted: the passes of each pipeline rank, and its memory over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.job import Job
from wlb_titan.memory.layer import TokenBytes
from wlb_titan.memory.peak import kept_states, weighted_tokens
from wlb_titan.packing.slices import kind
from wlb_titan.pipeline.graph import PipelineGraph
from wlb_titan.plan import LENGTH, MicroBatch, Plan
from wlb_titan.simulator.passes import MicroBatches, both_times, transfer_seconds
from wlb_titan.simulator.slices import cache_bytes, replica_graph
from wlb_titan.timeline import Span

Floats = NDArray[np.float64]
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Activations of one pipeline rank over a step.

    Attributes:
        rank: pipeline-parallel rank.
        seconds: float64 (actions,), when each of its actions ends.
        bytes_: float64 (actions,), of activations that it holds from then on.
    """

    rank: int
    seconds: Floats
    bytes_: Floats


def step_timeline(
    job: Job, plan: Plan, name: str = "step", dp_rank: int | None = None
) -> tuple[list[Span], list[MemoryCurve]]:
    """The step of one data-parallel replica.

    Args:
        job: the job.
        plan: of the step.
        name: the process of the spans.
        dp_rank: the replica; None takes the one that takes longest.

    Returns:
        A slice for each pass, on the track of its pipeline rank, and each rank's memory.
    """
    ranks = range(job.degrees.data) if dp_rank is None else [dp_rank]
    steps = [_replica(job, plan, name, rank) for rank in ranks]
    return max(steps, key=lambda step: max(piece.start + piece.duration for piece in step[0]))


def _replica(job: Job, plan: Plan, name: str, dp_rank: int) -> tuple[list[Span], list[MemoryCurve]]:
    micro_batches = plan.of_rank(dp_rank)
    if plan.order is None:
        run = job.run or len(micro_batches)
        graph = PipelineGraph(job.shape, run)
    else:
        run = len(micro_batches)
        graph = replica_graph(job, plan, dp_rank)
    backward = None if plan.backward is None else plan.backward_of_rank(dp_rank)
    token = TokenBytes.of(job.model, job.degrees, job.memory, job.exchange)
    # What a stage keeps of a token.
    kept_bytes = [token.kept * layers for layers in job.layers]
    if backward is not None:
        kept_bytes = [token.hidden * states for states in kept_states(job.layers)]
    spans: list[Span] = []
    curves: dict[int, tuple[list[float], list[float]]] = {
        rank: ([0.0], [0.0]) for rank in range(job.degrees.pipeline)
    }
    begin = 0.0
    for first in range(0, len(micro_batches), run):
        here = micro_batches[first : first + run]
        passing = MicroBatches.of(here, job).in_runs(run)
        of_backward = backward or here
        back = passing if backward is None else MicroBatches.of(of_backward, job).in_runs(run)
        times = both_times(job, passing, None if backward is None else back)
        delays = (transfer_seconds(job, each.tokens) for each in (passing, back))
        ends = graph.ends(times, *delays)[:, 0]
        for rank in range(job.degrees.pipeline):
            own = [i for i, action in enumerate(graph.actions) if job.shape.rank_of(action.stage) == rank]
            actions = [graph.actions[i] for i in own]
            forward_tokens, backward_tokens = ([m.length for m in each] for each in (here, of_backward))
            held = weighted_tokens(actions, forward_tokens, kept_bytes, backward_tokens)
            cached = [0.0] * len(own) if plan.order is None else cache_bytes(job, actions, plan, dp_rank)
            curves[rank][0].extend(begin + ends[i] for i in own)
            curves[rank][1].extend(kept + more for kept, more in zip(held, cached, strict=True))
            for i in own:
                action = graph.actions[i]
                micro_batch = (here if action.kind == "F" else of_backward)[action.place]
                seconds = float(times.of(action)[0])
                spans.append(
                    Span(
                        process=name,
                        track=f"pp {rank}",
                        name=f"{action.kind}{first + action.place}",
                        start=begin + float(ends[i]) - seconds,
                        duration=seconds,
                        args={
                            "pass": NAMES[action.kind],
                            "stage": action.stage,
                            "tokens": micro_batch.length,
                            "documents": len(micro_batch.documents),
                            "sharding": micro_batch.sharding or "none",
                            **_slices_of(micro_batch),
                        },
                    )
                )
        begin += float(ends.max())
    return spans, [MemoryCurve(rank, *map(np.array, curve)) for rank, curve in curves.items()]


def _slices_of(micro_batch: MicroBatch) -> dict[str, Any]:
    """What a timeline says of a MicroPack: its formation state and the tokens of its slices."""
    if micro_batch.slices is None:
        return {}
    lengths = micro_batch.documents[:, LENGTH]
    state = {"MicroPack": kind(micro_batch.slices, lengths)}
    slices = ", ".join(
        f"{prefix}-{prefix + length} of {total}"
        for length, (prefix, total) in zip(lengths.tolist(), micro_batch.slices.tolist(), strict=True)
        if total > length
    )
    return state | ({"slice": slices} if slices else {})
