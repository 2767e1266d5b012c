"""Planners under `slim` for tests, and what holds for plans of it and of every other policy."""

import numpy as np
from planning import FULL, NONE, job

from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.packing.rules import miscounted
from wlb_titan.packing.slim.slim import Slim
from wlb_titan.plan import ID, LENGTH, START
from wlb_titan.simulator.replicas import check_slices

WINDOW = 64


def slim(**settings):
    return Slim.Config(**{"micropacks": 6, "slack": 0, "cost_model": "quadratic:1,40", **settings})


PACKINGS = {"slim": slim(dp_merge=False), "merged": slim(dp_merge=True), "asymmetric": slim(asymmetric=True)}


def sliced(packing=None, **changes):
    """A job as `planning.job`, on two pipeline ranks."""
    packing = packing or slim()
    facts = {"degrees": Degrees(pipeline=2), "memory": FULL if packing.asymmetric else NONE}
    return job(**{"packing": packing, "micro_batches": 4, **facts, **changes})


def planner(lengths, packing=None, *, seed=7, **changes):
    return sliced(packing, **changes).planner(Documents(lengths=np.asarray(lengths), seed=seed))


def assert_conserved(planner, plans):
    """Asserts that all that the planner's stream gave was trained once, was lost or waits, forward as
    backward, and that the slices of a document lie on one data-parallel rank, or on those that share it."""
    lost, ranks = sum(plan.lost_tokens for plan in plans), {}
    assert all(plan.tokens == plan.document_lengths.sum() for plan in plans)
    for kind in "FB":
        packs = [m for plan in plans for m in plan.micro_batches if kind in m.passes]
        packs = [m for m in packs if not m.merged or m.dp_rank == m.merged[0]]
        packed = [m.documents[:, : LENGTH + 1] for m in packs]
        assert not miscounted(planner._stream, packed, planner.policy.waiting, lost)
        of_pieces = [(number, m.dp_rank) for m in packs for number in _numbers(m)]
        assert all(ranks.setdefault(number, dp_rank) == dp_rank for number, dp_rank in of_pieces)


def _numbers(m):
    """The piece of each row: its document, and its first token there."""
    before = 0 if m.prefix is None else m.prefix
    return list(map(tuple, np.stack([m.documents[:, ID], m.documents[:, START] - before], axis=1).tolist()))


def assert_sharers_agree(plan):
    """Asserts that ranks that share a pack have the same one."""
    for m in plan.micro_batches:
        for other in (plan.of_rank(rank)[m.index] for rank in m.merged):
            assert m.dp_rank in m.merged == other.merged and other.length == m.length
            assert (other.documents == m.documents).all()


def nothing(dp_rank, action):
    return 0.0


def run_through(plan, stages, seconds=nothing, delay=nothing):
    """Runs the passes of all ranks, each when what it needs has run, and a shared one when all of its sharers
    can; asserts that none waits for ever.

    Args:
        seconds: of a data-parallel rank's pass.
        delay: seconds until such a pass has what the stage before it computed.

    Returns:
        When the last one ends.
    """
    needed = [_last_forward(plan.of_rank(rank)) for rank in range(len(plan.flows))]
    for rank, flow in enumerate(plan.flows):
        assert check_slices(flow, plan.of_rank(rank)) == needed[rank]
    queues = {(dp, pp): list(own) for dp, flow in enumerate(plan.flows) for pp, own in enumerate(flow)}
    ends, idle = {}, dict.fromkeys(queues, 0.0)

    def ready(dp, pp, action):
        """When a rank can run it; infinity where what it needs has not run."""
        kind, stage, place = action
        source = stage - 1 if kind == "F" else stage + 1
        if source == -1:
            return idle[dp, pp]
        if source == stages:
            return max(idle[dp, pp], ends.get((dp, "F", stage, needed[dp][place]), np.inf))
        return max(idle[dp, pp], ends.get((dp, kind, source, place), np.inf) + delay(dp, action))

    moved = True
    while moved:
        moved = False
        for (dp, pp), queue in queues.items():
            while queue:
                action = queue[0]
                sharers = plan.of_rank(dp)[action.place].merged or [dp]
                start = max(ready(one, pp, action) for one in sharers)
                if start == np.inf or any(queues[one, pp][:1] != [action] for one in sharers):
                    break
                for one in sharers:
                    del queues[one, pp][0]
                    idle[one, pp] = ends[one, *action] = start + seconds(one, action)
                moved = True
    left = {ranks: list(map(str, queue)) for ranks, queue in queues.items() if queue}
    assert not left, f"passes that never run, by data-parallel and pipeline rank: {left}"
    return max(idle.values())


def _last_forward(packs):
    """For each backward pass the last forward pass that has any of its documents, by their places."""
    last = {}
    for place, m in enumerate(packs):
        last |= dict.fromkeys(_numbers(m), place) if "F" in m.passes else {}
    return {place: max(map(last.get, _numbers(m))) for place, m in enumerate(packs) if "B" in m.passes}
