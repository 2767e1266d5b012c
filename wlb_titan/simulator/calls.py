"""Whether all ranks' calls to their process groups meet, by the rules of NCCL (docs/dryrun.md).

All ranks' calls are played at the same time, each rank's in order:

- A process group is made by all ranks of the job, one group after the other.
- A group's calls run in order. A collective starts when all members have come to it, with the same kind,
  dtype and sizes; each rank waits until it is done, since a job that needs two communicators at a time may
  hang under NCCL.
- Sends and receives wait in a queue, and the rank goes on. They leave it in order, those issued together at
  the same time, each when the other side has come to it with as many bytes.

Two ranks that send to each other before they receive, in one queue, wait for ever; gloo lets this pass:

    rank 0: send to 1, receive from 1        rank 1: send to 0, receive from 0

`alike` finds the ranks whose calls are those of another, moved to their place.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from wlb_titan.dimensions.degrees import Grid
from wlb_titan.job import Job
from wlb_titan.plan import LENGTH, MicroBatch, Plan

SEND, RECEIVE, MAKING = "send", "receive", "making of the process group"
OTHER_SIDE = {SEND: RECEIVE, RECEIVE: SEND}

SHARED = ("tp", "dp_replicate", "dp_shard")
"""Axes along which ranks make the same calls in a step, each within its own groups."""


class Call(NamedTuple):
    kind: str  # "all-gather", "send", ...
    group: int  # which of the rank's groups
    sent: int = 0  # bytes
    received: int = 0
    dtype: str = ""
    peer: int = -1  # global rank of the other side, or of a collective's root; -1: none
    batch: int = 0  # equal for sends and receives issued together; 0: by itself
    place: str = ""  # where it is made, for people

    def __str__(self) -> str:
        if self.kind in (MAKING, "barrier"):
            return self.kind + (f" ({self.place})" if self.place else "")
        where = {SEND: f" to rank {self.peer}", RECEIVE: f" from rank {self.peer}"}.get(self.kind, "")
        sizes = dict.fromkeys(size for size in (self.sent, self.received) if size) or [0]
        bytes_ = " to ".join(f"{size:,}" for size in sizes)
        return f"{self.kind}{where} of {bytes_} bytes {self.dtype} ({self.place})"


@dataclass(frozen=True)
class RankCalls:
    made: int  # process groups that it helped to make, as a member or not
    groups: Sequence[tuple[int, ...]]  # global ranks of each of its groups, in the order of making
    calls: Sequence[Call]  # in order


def unmet(ranks: Mapping[int, RankCalls], *, queue_per_edge: bool) -> str | None:
    """A call that ranks make differently, or who waits for whom; None if all calls meet. With
    `queue_per_edge` each direction between two ranks has a queue of its own."""
    made: dict[int, list[int]] = defaultdict(list)
    for rank, log in ranks.items():
        made[log.made].append(rank)
    if len(made) > 1:
        counts = "; ".join(f"{number} by {_named(group)}" for number, group in sorted(made.items()))
        return f"Process groups are not made by all ranks together, but {counts}."
    return _Play(ranks, queue_per_edge).run()


class Communicator(NamedTuple):
    ranks: tuple[int, ...]  # the group's members, or the two ends of an edge with a queue of its own
    group: tuple[tuple[int, ...], int]  # members, and number among groups with the same ones


class _Play:
    def __init__(self, ranks: Mapping[int, RankCalls], queue_per_edge: bool) -> None:
        self._per_edge = queue_per_edge
        # The `Communicator.group` of each of a rank's groups.
        self._groups = {
            rank: [(members, log.groups[:place].count(members)) for place, members in enumerate(log.groups)]
            for rank, log in ranks.items()
        }
        # A rank first makes its groups in order.
        self._calls = {
            rank: itertools.chain((Call(MAKING, number) for number in range(len(log.groups))), log.calls)
            for rank, log in ranks.items()
        }
        # Calls not yet done, in order; those issued together share a list.
        self._queues: dict[Communicator, dict[int, deque[list[Call]]]] = {}
        # The communicator of the collective that a rank has come to.
        self._blocked: dict[int, Communicator] = {}

    def run(self) -> str | None:
        ready = deque(self._calls)
        while ready:
            rank = ready.popleft()
            for call in self._calls[rank]:
                communicator = self._queue(rank, call)
                if call.kind not in OTHER_SIDE:
                    self._blocked[rank] = communicator
                problem, freed = self._settle(communicator)
                if problem:
                    return problem
                ready += [other for other in freed if other != rank]
                if rank in self._blocked:
                    break
        waiting = {rank: group for group, queues in self._queues.items() for rank in queues if queues[rank]}
        return self._circle(waiting | self._blocked) if waiting else None

    def _queue(self, rank: int, call: Call) -> Communicator:
        group = self._groups[rank][call.group]
        ranks = group[0]
        if call.kind in OTHER_SIDE and self._per_edge:
            ranks = (rank, call.peer) if call.kind == SEND else (call.peer, rank)
        communicator = Communicator(ranks, group)
        if communicator not in self._queues:
            self._queues[communicator] = {member: deque() for member in ranks}
        queue = self._queues[communicator][rank]
        if call.batch and queue and queue[-1][-1].batch == call.batch:
            queue[-1].append(call)
        else:
            queue.append([call])
        return communicator

    def _settle(self, communicator: Communicator) -> tuple[str | None, list[int]]:
        """Completes all calls that meet; returns a problem, if any, and the ranks that go on."""
        queues = self._queues[communicator]
        while True:
            heads = {rank: queue[0] for rank, queue in queues.items() if queue}
            if all(map(self._is_at, queues.values())):
                if problem := _difference({rank: head[0] for rank, head in heads.items()}):
                    return problem, []
                for rank, queue in queues.items():
                    queue.popleft()
                    del self._blocked[rank]
                return None, list(queues)
            pair = next(_pairs(heads), None)
            if pair is None:
                return None, []
            (rank, call), (peer, other) = pair
            if (call.sent, call.dtype) != (other.received, other.dtype):
                return _different(rank, call, peer, other), []
            for end, done in pair:
                heads[end].remove(done)
                if not heads[end]:
                    queues[end].popleft()

    def _circle(self, waiting: Mapping[int, Communicator]) -> str:
        seen: list[int] = []
        lines: list[str] = []
        rank = min(waiting)
        while rank not in seen:
            seen.append(rank)
            if rank not in waiting:
                return "; ".join([*lines, f"rank {rank} makes no call any more that would end this"]) + "."
            queues = self._queues[waiting[rank]]
            call = queues[rank][0][0]
            if call.kind in OTHER_SIDE:
                other, over = call.peer, ""
            else:
                other = next(member for member in queues if not self._is_at(queues[member]))
                over = f" over {_named(waiting[rank].ranks)}"
            lines.append(f"rank {rank} waits for rank {other} in {call}{over}")
            rank = other
        return "; ".join([*lines, f"and so on from rank {rank}"]) + "."

    @staticmethod
    def _is_at(queue: deque[list[Call]]) -> bool:
        """Whether a rank has come to a collective."""
        return bool(queue) and queue[0][0].kind not in OTHER_SIDE


def _pairs(heads: Mapping[int, list[Call]]) -> Iterator[tuple[tuple[int, Call], tuple[int, Call]]]:
    for rank, calls in heads.items():
        for call in calls:
            if call.kind == SEND:
                for other in heads.get(call.peer, ()):
                    if other.kind == RECEIVE and other.peer == rank:
                        yield (rank, call), (call.peer, other)
                        break


def _difference(calls: Mapping[int, Call]) -> str | None:
    """How the members' calls of one collective differ, by rank."""
    (first, call), *others = calls.items()
    for rank, other in others:
        if _facts(other) != _facts(call):
            return _different(first, call, rank, other)
    sent, received = (sum(getattr(call, way) for call in calls.values()) for way in ("sent", "received"))
    if call.kind == "all-to-all" and sent != received:
        return f"{_named(list(calls))} send {sent:,} bytes and receive {received:,} in {call}."
    return None


def _facts(call: Call) -> tuple[object, ...]:
    """What all members of a collective must agree on."""
    uneven = call.kind in ("all-to-all", "gather", "scatter")
    return call.kind, call.dtype, call.peer, *(() if uneven else (call.sent, call.received))


def _different(rank: int, call: Call, other_rank: int, other: Call) -> str:
    return f"Rank {rank} and rank {other_rank} differ where they meet: {call}, and {other}."


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def alike(job: Job, plan: Plan) -> dict[int, int]:
    """For each global rank, the first one that does the same in a step.

    Tensor-parallel ranks always do. Data-parallel ranks do where their micro-batches agree, one by one, in
    length and in all that context parallelism exchanges.
    """
    first: dict[object, int] = {}
    representative = {}
    for rank in range(job.degrees.ranks):
        place = job.degrees.grid.place(rank)
        apart = tuple(number for axis, number in place.items() if axis not in SHARED)
        replica = job.degrees.replica_at(place)
        packs = plan.of_rank(replica)
        flow = None if plan.flows is None else plan.flows[replica]
        merged = replica if any(pack.merged for pack in packs) else None
        steps = tuple(_shapes(job, pack, replica, place["cp"]) for pack in packs)
        representative[rank] = first.setdefault((apart, steps, flow, merged), rank)
    return representative


def _shapes(job: Job, pack: MicroBatch, replica: int, context_rank: int) -> tuple[object, ...]:
    """All that decides the sizes of a rank's calls for a micro-batch."""
    strategy = job.by_sharers[pack.sharers].strategy
    if strategy is None or pack.ranks is None:
        return (pack.length,)
    before = replica - pack.merged.start if pack.merged else 0
    rank = before * job.degrees.context + context_rank
    lengths = pack.documents[:, LENGTH]
    mask = strategy.mask(pack.ranks, lengths, pack.shared_length, rank, pack.elsewhere)
    return pack.length, pack.groups, *_sizes(mask.exchange)


def _sizes(exchange: tuple[Any, ...]) -> Iterator[int]:
    """The numbers in `ContextMask.exchange`, and the lengths of its arrays."""
    for part in exchange:
        if isinstance(part, tuple):
            yield from _sizes(part)
        else:
            yield len(part) if isinstance(part, np.ndarray) else int(part)


def calls_of_all(ran: Mapping[int, RankCalls], same: Mapping[int, int], grid: Grid) -> dict[int, RankCalls]:
    """Every rank's calls, from those of the first that does the same, as `alike` has it in `same`."""
    return {rank: _moved(ran[first], first, rank, grid) for rank, first in same.items()}


def _moved(calls: RankCalls, start: int, to: int, grid: Grid) -> RankCalls:
    """The calls of rank `start`, as `to` makes them."""
    peers = {call.peer for call in calls.calls if call.peer >= 0}
    moved = {peer: grid.moved([start, peer], start, to)[1] for peer in peers}
    return replace(
        calls,
        groups=[grid.moved(members, start, to) for members in calls.groups],
        calls=[call._replace(peer=moved.get(call.peer, -1)) for call in calls.calls],
    )
