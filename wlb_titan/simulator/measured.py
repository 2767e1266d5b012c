"""The passes of a step, put together from measurements of some of its ranks, as docs/rehearsal.md describes.

A pass that did not run takes its predicted time, scaled by measured over predicted of the same micro-batch on
the most similar stage that ran, or of all micro-batches there if this one did not run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.cost.cluster import Cluster, Link
from wlb_titan.job import Job
from wlb_titan.packing.predicted import pass_seconds
from wlb_titan.plan import MicroBatch, Plan

ROWS = {"F": [0], "L": [0], "FB": [0, 1, 2], "B": [1, 2], "R": [1, 2], "I": [1], "W": [2]}
"""Rows of `seconds` (0 forward, 1 inputs, 2 weights) that a kind of pass covers, in predicted shares."""
TINY = 1e-30  # seconds; instead of 0 in a denominator


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of a run, measured or predicted, as files and pictures have it."""

    kind: str
    """F forward, R a backward pass put together, L loss, B backward, I and W the backward passes of inputs
    and of weights alone, FB a whole micro-batch without pipeline parallelism."""
    stage: int
    micro_batch: int  # number in this data-parallel rank's step
    start: float  # seconds since the timer was switched on, or from the start of a picture
    seconds: float
    replica: str = ""  # the first level of a picture: `dp 0`, or a policy
    rank: str = ""  # the line within it: `pp 0 cp 1`
    pieces: Sequence[float] = ()  # `seconds` divided where collectives were; empty: not measured
    waited: float | None = None  # seconds of waiting for its collectives; None: not known
    facts: Mapping[str, Any] = field(default_factory=dict)  # what a click on it shows

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    dp: int
    cp: int
    passes: Sequence[Pass]  # all that it ran, with no communication in them
    optimizer: float  # seconds from the last pass to the step's end


@dataclass(frozen=True, slots=True)
class MeasuredPasses:
    """Replaces the predicted passes of one step, with its micro-batches in the plan's order."""

    seconds: Floats  # (3, stages, micro-batches), as of `pass_seconds`
    optimizer: float  # seconds, of the slowest rank that ran
    rest: Job  # without the communication that was counted


def measured(
    job: Job, plans: Sequence[Plan], steps: Sequence[Sequence[MeasuredStep]]
) -> list[MeasuredPasses]:
    """The passes of planned steps, from the ranks that ran each of them, at least one."""
    quiet = job.on(without_waiting(job.cluster))
    packs = [m for plan in plans for m in plan.micro_batches]
    step = [number for number, plan in enumerate(plans) for _ in plan.micro_batches]
    # Collectives that were counted are not predicted as well.
    rest = job
    if any(pass_.waited is not None for ranks in steps for rank in ranks for pass_ in rank.passes):
        rest = replace(job, tensor_overlap=1.0) if job.overlap else quiet
    slowest, waiting = pass_seconds(quiet, packs), pass_seconds(rest, packs)
    ran = _RanPasses(job, packs, step)
    by_cp = {cp: pass_seconds(quiet, packs, cp) for cp in {rank.cp for ranks in steps for rank in ranks}}
    for number, ranks in enumerate(steps):
        ran.add(number, ranks, by_cp)
    passes = ran.scaled(slowest)
    seconds = np.stack([_filled(*of_kind, job.layers) for of_kind in zip(passes, slowest, strict=True)])
    seconds += waiting - slowest
    result = []
    for number, ranks in enumerate(steps):
        of_step = np.array(step) == number
        optimizer = max(rank.optimizer for rank in ranks)
        result.append(MeasuredPasses(seconds[:, :, of_step], optimizer, rest))
    return result


def without_waiting(cluster: Cluster) -> Cluster:
    free = Link(float("inf"), 0.0)
    return replace(cluster, node=free, network=free)


class _RanPasses:
    """`passes` that ran, float64 (3, stages, micro-batches), else nan; and `predicted`, their predictions: of
    several ranks that ran a pass the most."""

    def __init__(self, job: Job, packs: Sequence[MicroBatch], step: Sequence[int]) -> None:
        self.passes = np.full((3, len(job.layers), len(step)), np.nan)
        self.predicted = np.zeros_like(self.passes)
        numbered = enumerate(zip(step, packs, strict=True))
        self._places = {(step, m.dp_rank, m.index): place for place, (step, m) in numbered}
        self._apart = packs[0].passes != "FB"
        # Data-parallel ranks that meet in FSDP's collectives, if nothing hides these.
        self._meeting = 1 if job.overlap or job.degrees.pipeline > 1 else job.degrees.shard

    def add(self, step: int, ranks: Sequence[MeasuredStep], by_cp: Mapping[int, Floats]) -> None:
        """One step's ranks; `by_cp` has the predicted passes of each context-parallel rank."""
        ran: dict[tuple[int, str, int, int], list[tuple[MeasuredStep, Pass]]] = defaultdict(list)
        for rank in ranks:
            for p in rank.passes:
                ran[rank.dp // self._meeting, p.kind, p.stage, p.micro_batch].append((rank, p))
        for (_, kind, stage, micro_batch), of_pass in ran.items():
            # A loss counts as forward, unless backward passes have micro-batches of their own.
            rows = ROWS["R" if kind == "L" and self._apart else kind]
            seconds = _together([p for _, p in of_pass]) + max(p.waited or 0.0 for _, p in of_pass)
            for dp in {rank.dp for rank, _ in of_pass}:
                where = rows, stage, self._places[step, dp, micro_batch]
                predicted = np.max([by_cp[rank.cp][where] for rank, _ in of_pass if rank.dp == dp], axis=0)
                self.passes[where] = np.nan_to_num(self.passes[where]) + seconds * predicted / predicted.sum()
                self.predicted[where] = predicted

    def scaled(self, slowest: Floats) -> Floats:
        """`passes`, scaled where the slowest context-parallel rank, predicted as `slowest`, did not run."""
        predicted = np.where(self.predicted > 0, self.predicted, slowest)
        return self.passes * np.maximum(slowest / np.maximum(predicted, TINY), 1.0)


def _together(ran: Sequence[Pass]) -> float:
    pieces = [pass_.pieces or [pass_.seconds] for pass_ in ran]
    if len({len(parts) for parts in pieces}) > 1:  # some have more collectives
        return max(pass_.seconds for pass_ in ran)
    return float(np.max(pieces, axis=0).sum())


def _filled(seconds: Floats, predicted: Floats, layers: Sequence[int]) -> Floats:
    """float64 (stages, micro-batches), with estimates of passes that did not run."""
    filled = seconds.copy()
    ran = np.isfinite(seconds)
    sources = [stage for stage in range(len(layers)) if ran[stage].any()]
    assert sources, "no rank ran"
    for stage in range(len(layers)):
        source = min(sources, key=lambda other: _unlike(stage, other, layers))
        present = ran[source]
        total = seconds[source, present].sum() / max(predicted[source, present].sum(), TINY)
        ratio = np.where(present, seconds[source] / np.maximum(predicted[source], TINY), total)
        missing = ~ran[stage]
        filled[stage, missing] = (predicted[stage] * ratio)[missing]
    return filled


def _unlike(stage: int, other: int, layers: Sequence[int]) -> tuple[bool, bool, int, int]:
    """How different two stages are: whether one of them has the head, then by layers, then by place."""
    last = len(layers) - 1
    return stage != other, (stage == last) != (other == last), abs(layers[stage] - layers[other]), other
