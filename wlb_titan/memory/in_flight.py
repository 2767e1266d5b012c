"""How many tokens a pipeline rank may have in flight where documents are sliced: what memory allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from wlb_titan.errors import PlanError
from wlb_titan.memory.peak import GIB, USABLE, RankMemory
from wlb_titan.pipeline.schedule import PipelineShape
from wlb_titan.plan import Action, CachedSlice, Flow

SLICES = 16  # of the document of which a step is imagined


def one_document(tokens: int, shape: PipelineShape) -> tuple[list[int], Flow, list[tuple[CachedSlice, ...]]]:
    """The step that holds most tokens for what it trains: one document, of which every slice is in flight.

    Args:
        tokens: of the document.
        shape: the pipeline.

    Returns:
        Lengths, order of passes and slices, as `pipeline_memory` takes them.
    """
    parts = min(SLICES, tokens)
    cuts = [tokens * part // parts for part in range(parts + 1)]
    slices: list[tuple[CachedSlice, ...]] = [
        (CachedSlice(start, stop - start, tokens),) for start, stop in itertools.pairwise(cuts)
    ]
    flow = []
    for rank in range(shape.ranks):
        stages = shape.stages_of(rank)
        forward = [Action("F", stage, place) for stage in stages for place in range(parts)]
        flow.append((*forward, *(Action("B", stage, place) for _, stage, place in reversed(forward))))
    return [one.length for (one,) in slices], tuple(flow), slices


def most_in_flight(
    memory: Callable[[int], Sequence[RankMemory]], window: int, step: int, device_bytes: float
) -> int:
    """The most tokens in flight that are predicted to fit.

    Args:
        memory: predicts the ranks' peaks of a step of `one_document` with so many tokens.
        window: context window in tokens; a document of so many has all of its slices in flight at once.
        step: tokens of a data-parallel rank in a step.
        device_bytes: memory of a device, of which `USABLE` is filled.

    Raises:
        PlanError: not even one document of the window fits, whatever the order; with the arithmetic.
    """

    def fullest(tokens: int) -> RankMemory:
        return max(memory(tokens), key=lambda rank: rank.total)

    most = fullest(window)
    if most.total > USABLE * device_bytes:
        raise PlanError(
            f"A document of {window:,} tokens has all of its slices in flight when its backward pass begins, "
            f"which does not fit {USABLE:.0%} of a device's {device_bytes / GIB:.1f} GiB in any order of "
            f"passes:\n{most.explain()}\nRaise a degree of parallelism, save more with activation "
            "checkpointing, or shorten the context window.",
            setting="training.seq_len",
        )
    fits, limit = window, max(step, window)
    while fits < limit:
        middle = (fits + limit + 1) // 2
        if fullest(middle).total <= USABLE * device_bytes:
            fits = middle
        else:
            limit = middle - 1
    return fits
