"""In which order MicroPacks of one data-parallel rank go backward, and what each waits for (`slim`)."""

from __future__ import annotations

from collections.abc import Sequence

from wlb_titan.packing.policy import Packing
from wlb_titan.packing.slim.asymmetric import last_needed
from wlb_titan.packing.slim.slices import sliced_document
from wlb_titan.pipeline.packflow import backward_order, forward_needed
from wlb_titan.plan import Action, Flow


def dependencies(packing: Packing) -> tuple[list[list[int]], list[list[int]]]:
    """The order of each data-parallel rank's backward passes, and the forward pass that each waits
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
