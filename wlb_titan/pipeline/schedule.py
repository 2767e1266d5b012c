"""The passes of each rank of a pipeline, in order, under torch's schedules.

Actions are forward passes F and backward passes B. Zero-bubble schedules split B: the previous stage waits
for the gradient of the inputs I, and that of the weights W fills gaps (Qi et al., Zero Bubble Pipeline
Parallelism). Where layers are recomputed B stays whole, in the place of I. Two ranks, 1F1B, three
micro-batches:

    rank 0: F0 F1 B0 F2 B1 B2        rank 1: F0 B0 F1 B1 F2 B2

A test compares the order with torch.distributed.pipelining's, action for action.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from wlb_titan.errors import PlanError
from wlb_titan.plan import Action


class Schedule(NamedTuple):
    """What a schedule of torch's does with the stages and passes of a rank."""

    chunks: int | None  # stages of a rank; None: two or more
    known: bool = True  # whether `rank_actions` has its order
    splits: bool = False  # whether it runs backward passes in two halves
    v_shaped: bool = False  # stages go down the ranks and back up: rank 0 has both ends
    flows: bool = False  # whether PackFlow can take its place: stage s lies on rank s mod ranks


SCHEDULES = {
    "GPipe": Schedule(1),
    "1F1B": Schedule(1, flows=True),
    "Interleaved1F1B": Schedule(None, flows=True),
    "InterleavedZeroBubble": Schedule(None, splits=True),
    "ZBVZeroBubble": Schedule(2, splits=True, v_shaped=True),
    "LoopedBFS": Schedule(None, known=False),
    "DualPipeV": Schedule(2, known=False, splits=True, v_shaped=True),
}
KNOWN = tuple(name for name, schedule in SCHEDULES.items() if schedule.known)


def canonical_name(name: str) -> str:
    """The schedule's name as SCHEDULES spells it; ValueError if there is none."""
    for known in SCHEDULES:
        if known.lower() == name.lower():
            return known
    raise ValueError(f"no pipeline schedule is called {name!r}; there are {', '.join(SCHEDULES)}")


@dataclass(frozen=True, slots=True)
class PipelineShape:
    schedule: str  # one of SCHEDULES
    ranks: int  # pipeline-parallel degree
    chunks: int = 1  # stages of each rank
    splits: bool = True  # whether zero-bubble schedules run backward passes in two halves

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        if SCHEDULES[self.schedule].v_shaped and stage >= self.ranks:
            return self.stages - 1 - stage
        return stage % self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)


def layers_of_stages(layers: int, stages: int, *, first_less: int = 1, last_less: int = 1) -> tuple[int, ...]:
    """A model's layers on each pipeline stage, as torchtitan divides them: embedding and head count as
    `first_less` and `last_less` layers, and the first stages get one more where these do not divide evenly.
    Example: 32 layers on 4 stages are 8, 9, 8 and 7."""
    if stages == 1:
        return (layers,)
    share, more = divmod(layers + first_less + last_less, stages)
    result = [share + (stage < more) for stage in range(stages)]
    result[0] -= first_less
    result[-1] -= last_less
    if min(result) < 0 or share < 1:
        raise PlanError(f"{layers} layers cannot be divided into {stages} pipeline stages; use fewer stages.")
    return tuple(result)


def rank_actions(shape: PipelineShape, micro_batches: int, rank: int) -> Iterator[Action]:
    schedule = SCHEDULES[shape.schedule]
    if not schedule.known:
        raise PlanError(
            f"The order of actions is known only for the schedules {', '.join(KNOWN)}, not for "
            f"{shape.schedule!r}. Choose one of those."
        )
    chunks = schedule.chunks or shape.chunks
    if shape.chunks != chunks:
        raise PlanError(
            f"{shape.schedule} runs {chunks} stage{'s' if chunks > 1 else ''} a rank, not {shape.chunks}. "
            "Change the number of stages or the schedule."
        )
    in_order = _v_shaped if schedule.v_shaped else _in_turn
    actions = in_order(shape, micro_batches, rank)
    if shape.splits:
        return actions
    return (a._replace(kind="B") if a.kind == "I" else a for a in actions if a.kind != "W")


def check_micro_batches(schedule: str, ranks: int, stages: int, n: int) -> None:
    """Refuses a number of micro-batches that a schedule of torch cannot run."""
    if schedule in ("1F1B", "DualPipeV") and n < stages:
        raise PlanError(
            f"{schedule} needs at least as many micro-batches as stages, but there are {n} for {stages} "
            "stages; raise training.local_batch_size or choose GPipe, LoopedBFS or ZBVZeroBubble."
        )
    micro_batches_in_round(schedule, ranks, n)


def micro_batches_in_round(schedule: str, ranks: int, n: int) -> int:
    """Micro-batches that go through a rank's first stage before its next one gets any."""
    if not schedule.startswith("Interleaved"):
        return n
    rounds = max(1, n // ranks)
    if n % rounds:
        raise PlanError(
            f"{schedule} cannot run {n} micro-batches on {ranks} ranks: they do not divide into {rounds} "
            f"equal rounds. A multiple of {ranks} always does."
        )
    return n // rounds


def _in_turn(shape: PipelineShape, n: int, rank: int) -> Iterator[Action]:
    """Some forward passes, then forward and backward in turn, then the backward passes that are left. With
    several stages a rank, passes go through them in rounds. With zero bubble, W runs `rank` pairs behind I,
    so that the ranks that would wait longest at the end have most of it left."""
    ranks, chunks = shape.ranks, shape.chunks
    zero_bubble = SCHEDULES[shape.schedule].splits
    ahead, in_round = ranks - 1 - rank, micro_batches_in_round(shape.schedule, ranks, n)
    if shape.schedule == "GPipe":
        ahead = n
    elif shape.schedule != "1F1B":
        ahead = (chunks - 1) * in_round + (1 if zero_bubble else 2) * ahead
    total = n * chunks
    ahead = min(ahead, total)

    def place(k: int) -> int:
        return k // (in_round * chunks) * in_round + k % in_round

    def forward(k: int) -> Action:
        return Action("F", k // in_round % chunks * ranks + rank, place(k))

    def backward(kind: Literal["B", "I", "W"], k: int) -> Action:
        return Action(kind, (chunks - 1 - k // in_round % chunks) * ranks + rank, place(k))

    for k in range(ahead):
        yield forward(k)
    for k in range(total):
        if ahead + k < total:
            yield forward(ahead + k)
        yield backward("I" if zero_bubble else "B", k)
        if zero_bubble and k >= rank:
            yield backward("W", k - rank)
    if zero_bubble:
        for k in range(max(total - rank, 0), total):
            yield backward("W", k)


def _v_shaped(shape: PipelineShape, n: int, rank: int) -> Iterator[Action]:
    """Torch makes the order for at least 2 ranks - 1 micro-batches and leaves out those from n on."""
    ahead, made = shape.ranks - rank, max(2 * shape.ranks - 1, n)
    down, up = rank, shape.stages - 1 - rank
    done = Counter[tuple[str, int]]()

    def run(stage: int, *kinds: Literal["F", "I", "W"]) -> Iterator[Action]:
        for kind in kinds:
            if done[kind, stage] < n:
                yield Action(kind, stage, done[kind, stage])
            done[kind, stage] += 1

    for _ in range(2 * ahead - 1):
        yield from run(down, "F")
    for _ in range(rank):
        yield from run(up, "F")
        yield from run(down, "F")
    for _ in range(ahead):
        yield from run(up, "F", "I", "W")
    while done["F", up] < done["F", down] or done["F", down] < made:
        if done["F", down] < made:
            yield from run(down, "F")
        yield from run(down, "I", "W")
        yield from run(up, "F", "I", "W")
    for _ in range(rank):
        yield from run(down, "I")
        yield from run(up, "I")
    for _ in range(ahead):
        yield from run(down, "I", "W")
    for stage in (up, down):
        while done["W", stage] < done["I", stage]:
            yield from run(stage, "W")
