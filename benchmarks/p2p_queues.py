"""What it costs a pipeline that all of a rank's sends and receives go through one queue, as in an NCCL group.

    python benchmarks/p2p_queues.py

takes the lists of computations, sends and receives that torch makes of an interleaved schedule. A forward
pass through a stage takes 1 unit, a backward pass 2, a transfer as given. A computation begins when the
rank's one before it and the transfer that it needs have ended; a transfer when, on both sides, the
computation before it in the list and the transfer before it in its queue have. There is one queue for a rank,
or one for each direction between two ranks (torch's `pipeline_per_edge_p2p`, which our jobs have).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import product
from typing import Any

from common import save, show
from torch.distributed.pipelining.schedules import _add_send_recv

from wlb_titan.pipeline.schedule import PipelineShape, rank_actions
from wlb_titan.runtime.compat import ComputationType, ScheduleAction

KINDS = {"F": ComputationType.FORWARD, "B": ComputationType.FULL_BACKWARD}
UNITS = {ComputationType.FORWARD: 1.0, ComputationType.FULL_BACKWARD: 2.0}
# A send: how many stages on its data goes, and the computation that needs it. A receive: where it comes from.
SENDS = {ComputationType.SEND_F: (1, KINDS["F"]), ComputationType.SEND_B: (-1, KINDS["B"])}
RECEIVES = {ComputationType.RECV_F: KINDS["F"], ComputationType.RECV_B: KINDS["B"]}
CASES = ((4, 2, 8), (8, 2, 16), (4, 4, 8))
"""Ranks, stages of each, micro-batches."""


def step_units(shape: PipelineShape, micro_batches: int, transfer: float, one_queue: bool) -> float:
    """Units that a step takes."""
    order: dict[int, list[Any]] = {
        rank: [
            ScheduleAction(a.stage, KINDS[a.kind], a.place) for a in rank_actions(shape, micro_batches, rank)
        ]
        for rank in range(shape.ranks)
    }
    waits: dict[Any, set[Any]] = defaultdict(set)
    for actions in _add_send_recv(order, shape.rank_of, shape.stages).values():
        computation: Any = None
        queues: dict[Any, Any] = {}
        for action in actions:
            stage, kind, number = action[:3]
            if kind in UNITS:
                waits[action] |= {one for one in (computation,) if one}
                computation = action
                continue
            hops, needed = SENDS.get(kind, (0, RECEIVES.get(kind)))
            target = ScheduleAction(stage + hops, needed, number)
            node = ("transfer", target)
            source = shape.rank_of(stage) if hops else None
            queue = None if one_queue else ("out" if source is not None else "in", _other(shape, stage, kind))
            waits[node] |= {one for one in (computation, queues.get(queue)) if one}
            waits[target].add(node)
            queues[queue] = node
    ends: dict[Any, float] = {}
    for node in TopologicalSorter(waits).static_order():
        took = transfer if node[0] == "transfer" else UNITS[node[1]]
        ends[node] = max((ends[one] for one in waits[node]), default=0.0) + took
    return max(ends.values())


def _other(shape: PipelineShape, stage: int, kind: Any) -> int:
    """The rank on the other side of a send or receive of a stage."""
    on = {"SEND_F": 1, "SEND_B": -1, "RECV_F": -1, "RECV_B": 1}
    return shape.rank_of(stage + on[kind.name])


def cases() -> Iterator[dict[str, Any]]:
    """Units of a step with one queue a rank and with one a direction."""
    for (ranks, chunks, micro_batches), transfer in product(CASES, (0.0, 0.1)):
        shape = PipelineShape("Interleaved1F1B", ranks, chunks)
        one, each = (step_units(shape, micro_batches, transfer, queue) for queue in (True, False))
        yield {
            "ranks": ranks,
            "stages of a rank": chunks,
            "micro-batches": micro_batches,
            "transfer": transfer,
            "one queue a rank": one,
            "one a direction": each,
            "longer": one / each - 1,
        }


COLUMNS = {
    **{name: f"{{{name}}}" for name in ("ranks", "stages of a rank", "micro-batches", "transfer")},
    **{name: f"{{{name}:.1f}}" for name in ("one queue a rank", "one a direction")},
    "longer": "{longer:.0%}",
}


if __name__ == "__main__":
    save("p2p_queues", show(COLUMNS, cases()))
