"""The number of steps of some epochs: planned once, so that the last one is complete and nothing is lost."""

from __future__ import annotations

import numpy as np

from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.job import Job
from wlb_titan.packing.policy import OnOneRank, here
from wlb_titan.plan import ID, LENGTH


def steps_of_epochs(job: Job, documents: Documents, epochs: int, on_one_rank: OnOneRank = here) -> int:
    """The first step after which every document was trained on `epochs` times.

    The stream has no end: what a step has room for besides comes from the next epoch, so that all steps are
    full. Plans follow from lengths alone, so this asks for no tokens; a step takes as long as its plan.

    Raises:
        PlanError: the documents are a mixture, of which no epoch is one.
    """
    if documents.sources:
        raise PlanError(
            "Sources of a mixture come round at different times, so it has no epochs; set "
            "training.steps, and leave wlb.epochs out.",
            setting="wlb.epochs",
        )
    planner = job.planner(documents, on_one_rank=on_one_rank)
    missing = epochs * documents.mixture().tokens
    end, steps = epochs * len(documents.lengths), 0
    while missing > 0:
        plan = planner.next(sharded=())
        pieces = np.concatenate([micro_batch.documents for micro_batch in plan.packs])
        missing -= int(pieces[pieces[:, ID] < end, LENGTH].sum()) + plan.lost_tokens
        steps += 1
    return steps
