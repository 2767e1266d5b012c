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
from wlb_titan.plan import Plan

ROWS = {"F": [0], "L": [0], "FB": [0, 1, 2], "B": [1, 2], "R": [1, 2], "I": [1], "W": [2]}
"""Rows of `seconds` (0 forward, 1 inputs, 2 weights) that a kind of pass covers, in predicted shares."""
NAMES = {"F": "forward", "B": "backward", "FB": "forward and backward", "L": "loss", "R": "recomputed"}
NAMES |= {"I": "backward of inputs", "W": "backward of weights"}
"""Kinds of passes in words."""
BESIDE = ("loading", "optimizer", "rest")
"""What a rank does in a measured step besides passes; kinds of `Pass`, too."""
FLOPS = "flops"  # fact of what is `BESIDE`: the model's, of the whole job's step
TINY = 1e-30  # seconds; instead of 0 in a denominator


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of a run, measured or predicted, as files and pictures have it."""

    kind: str
    """F forward, R a backward pass put together, L loss, B backward, I and W the backward passes of inputs
    and of weights alone, FB a whole micro-batch without pipeline parallelism; or one of `BESIDE`."""
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


def step_parts(passes: Sequence[Pass]) -> dict[str, float]:
    """Seconds of a measured step on the average rank, which add up to its time: by the names of passes, by
    what is `BESIDE` them, and "waiting", for stages or for the last rank to compute."""
    ends: dict[tuple[str, str], float] = defaultdict(float)
    parts: dict[str, float] = defaultdict(float)
    last = max(p.end for p in passes if p.kind in NAMES)
    for p in passes:
        place = p.replica, p.rank
        ends[place] = max(ends[place], p.end, last)
        parts[NAMES.get(p.kind, p.kind)] += p.seconds
    parts["waiting"] = max(sum(ends.values()) - sum(parts.values()), 0.0)
    return {name: seconds / len(ends) for name, seconds in parts.items()}


def bubble(passes: Sequence[Pass]) -> float:
    """Mean share of the ranks' time without a pass, from a pipeline's first pass to its last."""
    idle = []
    for replica in {p.replica for p in passes}:
        own = [p for p in passes if p.replica == replica and p.kind in NAMES]
        span = max(p.end for p in own) - min(p.start for p in own)
        idle.append(1 - sum(p.seconds for p in own) / (span * len({p.rank for p in own})))
    return float(np.mean(idle))


def measured(
    job: Job, plans: Sequence[Plan], steps: Sequence[Sequence[MeasuredStep]]
) -> list[MeasuredPasses]:
    """The passes of planned steps, from the ranks that ran each of them, at least one."""
    computing = job.on(without_waiting(job.cluster))
    packs = [m for plan in plans for m in plan.micro_batches]
    # Collectives that were counted are not predicted as well.
    rest = job
    if any(pass_.waited is not None for ranks in steps for rank in ranks for pass_ in rank.passes):
        rest = replace(job, tensor_overlap=1.0) if job.overlap else computing
    slowest, waiting = pass_seconds(computing, packs), pass_seconds(rest, packs)
    passes = _ran(computing, plans, steps, slowest)
    seconds = np.stack([_filled(*of_kind, job.layers) for of_kind in zip(passes, slowest, strict=True)])
    ends = np.cumsum([len(plan.micro_batches) for plan in plans])[:-1]
    by_step = np.split(seconds + waiting - slowest, ends, axis=2)
    optimizers = [max(rank.optimizer for rank in ranks) for ranks in steps]
    return [MeasuredPasses(*step, rest) for step in zip(by_step, optimizers, strict=True)]


def without_waiting(cluster: Cluster) -> Cluster:
    free = Link(float("inf"), 0.0)
    return replace(cluster, node=free, network=free)


def _ran(
    computing: Job, plans: Sequence[Plan], steps: Sequence[Sequence[MeasuredStep]], slowest: Floats
) -> Floats:
    """float64 (3, stages, micro-batches), the passes that ran, else nan; scaled where the slowest
    context-parallel rank, predicted as `slowest`, did not run."""
    packs = [m for plan in plans for m in plan.micro_batches]
    numbered = [(number, m.dp_rank, m.index) for number, plan in enumerate(plans) for m in plan.micro_batches]
    places = {key: place for place, key in enumerate(numbered)}
    by_cp = {cp: pass_seconds(computing, packs, cp) for cp in {rank.cp for ranks in steps for rank in ranks}}
    # Data-parallel ranks that meet in FSDP's collectives, if nothing hides these.
    meeting = 1 if computing.overlap or computing.degrees.pipeline > 1 else computing.degrees.shard
    ran: dict[tuple[int, int, str, int, int], list[tuple[MeasuredStep, Pass]]] = defaultdict(list)
    for step, ranks in enumerate(steps):
        for rank in ranks:
            for p in rank.passes:
                ran[step, rank.dp // meeting, p.kind, p.stage, p.micro_batch].append((rank, p))
    passes = np.full_like(slowest, np.nan)
    for (step, _, kind, stage, micro_batch), of_pass in ran.items():
        # A loss counts as forward, unless backward passes have micro-batches of their own.
        rows = ROWS["R" if kind == "L" and packs[0].passes != "FB" else kind]
        seconds = _together([p for _, p in of_pass]) + max(p.waited or 0.0 for _, p in of_pass)
        for dp in {rank.dp for rank, _ in of_pass}:
            where = rows, stage, places[step, dp, micro_batch]
            predicted = np.max([by_cp[rank.cp][where] for rank, _ in of_pass if rank.dp == dp], axis=0)
            slower = np.maximum(slowest[where] / np.maximum(predicted, TINY), 1.0)
            passes[where] = np.nan_to_num(passes[where]) + seconds * predicted / predicted.sum() * slower
    return passes


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
