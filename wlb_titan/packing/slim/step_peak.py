"""The peak of a step of MicroPacks: what its replicas run, as memory sees it (`slim`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from wlb_titan.context import ALL_KEYS
from wlb_titan.memory.fits import fullest
from wlb_titan.memory.rank import Passes, RankMemory
from wlb_titan.packing.policy import Packing
from wlb_titan.packing.slim.dependencies import dependencies, in_own_order
from wlb_titan.packing.slim.slices import ReplicaPacks, passes_of
from wlb_titan.plan import LENGTH, Flow

if TYPE_CHECKING:
    from wlb_titan.job import Job

LOOKED_AT = 2
"""Data-parallel ranks of a step that are predicted: those with most tokens in flight, and one more."""


def step_peak(packing: Packing, flow: Flow, job: Job) -> RankMemory | None:
    """The predicted peak of a step's fullest GPU; None where memory is not predicted."""
    if job.memory_unknown:
        return None
    orders, _ = dependencies(packing)
    return fullest(
        [
            fullest(job.fitting.peak(_passes(packing, rank, in_own_order(flow, orders[rank]), job)))
            for rank in _candidates(packing, flow, orders)
        ]
    )


def _candidates(packing: Packing, flow: Flow, orders: Sequence[Sequence[int]]) -> list[int]:
    """The data-parallel ranks of which one should be the fullest: by the most tokens in flight on the first
    pipeline rank, and by the longest pack."""
    assert packing.assigned is not None
    if len(packing.assigned) <= LOOKED_AT:
        return list(range(len(packing.assigned)))
    ranks = np.array(packing.assigned)
    added, freed = (np.array([pack[:, LENGTH].sum() for pack in one.packs])[ranks] for one in packing.by_pass)
    freed = np.take_along_axis(freed, np.array(orders), axis=1)
    changes = [added[:, a.place] if a.kind == "F" else -freed[:, a.place] for a in flow[0]]
    most = np.cumsum(changes, axis=0).max(axis=0)
    return list({*most.argsort()[-LOOKED_AT:].tolist(), int(freed.max(axis=1).argmax())})


def _passes(packing: Packing, rank: int, flow: Flow, job: Job) -> Passes:
    """What one data-parallel rank runs."""
    return passes_of(packing.by_pass.each(lambda one: _packs(one, rank, job)), flow)


def _packs(packing: Packing, rank: int, job: Job) -> ReplicaPacks:
    assert packing.assigned is not None
    numbers = packing.assigned[rank]
    sharers = packing.sharers[numbers].tolist()
    lengths = [
        job.padded(int(packing.packs[number][:, LENGTH].sum()), ranks) // ranks
        for number, ranks in zip(numbers, sharers, strict=True)
    ]
    return ReplicaPacks(lengths, sharers, [ALL_KEYS] * len(lengths), packing.parts(numbers))
