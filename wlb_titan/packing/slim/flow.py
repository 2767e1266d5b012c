"""The order of passes of a step of MicroPacks, for all data-parallel ranks of a job together (`slim`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.packing.policy import Packing
from wlb_titan.packing.slim.asymmetric import last_needed
from wlb_titan.packing.slim.slices import sliced_document
from wlb_titan.pipeline.packflow import Packs, Schedule, backward_order, forward_needed, packflow
from wlb_titan.pipeline.schedule import PipelineShape
from wlb_titan.plan import LENGTH, Action, Flow

Floats = NDArray[np.float64]


def job_flow(
    packing: Packing,
    forward: Floats,
    backward: Floats,
    shape: PipelineShape,
    held: Mapping[int, float],
    *,
    slack: int = 0,
    limit: float | None = None,
) -> Schedule:
    """Which kind of pass runs when, on all data-parallel ranks, as the slowest of them needs.

    FSDP's ranks meet in collectives in forward and in backward passes (all without a pipeline, those of the
    head with one), so they have to run the same kinds of passes at the same places. Backward passes are
    numbered here in the order in which they run, whatever packs these are on a rank. Tokens in flight are the
    mean over the ranks.

    Args:
        packing: of the step.
        forward, backward: float64 (packs,), how long passes take.
        shape: the pipeline.
        held: what a token holds in memory, by how many data-parallel ranks share its pack.
        slack, limit: as of `packflow`.
    """
    ranks = np.array(packing.assigned)
    orders, needed = map(np.array, dependencies(packing))
    weights = np.array([held[sharers] for sharers in packing.sharers.tolist()])
    tokens, freed = (
        (weights * [pack[:, LENGTH].sum() for pack in one.packs])[ranks] for one in packing.by_pass
    )

    def ran(values: NDArray[Any]) -> NDArray[Any]:
        most: NDArray[Any] = np.take_along_axis(values, orders, axis=1).max(axis=0)
        return most

    packs = Packs(
        forward=forward[ranks].max(axis=0),
        backward=ran(backward[ranks]),
        tokens=tokens.mean(axis=0),
        freed=np.take_along_axis(freed, orders, axis=1).mean(axis=0),
        order=range(ranks.shape[1]),
        needed=ran(needed).tolist(),
    )
    return packflow(packs, shape, slack=slack, limit=limit)


def dependencies(packing: Packing) -> tuple[list[list[int]], list[list[int]]]:
    """Of each data-parallel rank the order of its backward passes, and the forward pass that each waits
    for."""
    assert packing.assigned is not None
    if packing.regrouped is not None:
        needed = [last_needed(packing.parts(own), packing.regrouped.parts(own)) for own in packing.assigned]
        return [list(range(len(own))) for own in packing.assigned], needed
    sliced = [[sliced_document(*part) for part in packing.parts(own)] for own in packing.assigned]
    return [backward_order(own) for own in sliced], [forward_needed(own) for own in sliced]


def in_own_order(flow: Flow, order: Sequence[int]) -> Flow:
    """A flow whose backward passes are numbered as they run, with the packs that they are on one rank."""
    return tuple(
        tuple(a if a.kind == "F" else Action("B", a.stage, order[a.place]) for a in actions)
        for actions in flow
    )
