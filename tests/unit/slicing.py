"""Steps in slices for tests: planners under `slim`, and what holds for plans of all its kinds."""

from collections import defaultdict

import numpy as np
from planning import FULL, NONE, job

from wlb_titan.context.layout import sequence_positions
from wlb_titan.cost.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.packing.slim.slim import Slim
from wlb_titan.plan import ID, START
from wlb_titan.simulator.replicas import check_slices

WINDOW = 64


def slim(**settings):
    return Slim.Config(**{"micropacks": 6, "slack": 0, "cost_model": "quadratic:1,40", **settings})


PACKINGS = {
    "slim": slim(dp_merge=False),
    "merged": slim(dp_merge=True),
    "asymmetric": slim(asymmetric=True),
}


def sliced(packing=None, **changes):
    """A job as `planning.job`, on two pipeline ranks."""
    packing = packing or slim()
    facts = {"degrees": Degrees(pipeline=2), "memory": FULL if packing.asymmetric else NONE}
    return job(**{"packing": packing, "micro_batches": 4, **facts, **changes})


def planner(lengths, packing=None, *, seed=7, **changes):
    return sliced(packing, **changes).planner(Documents(lengths=np.asarray(lengths), seed=seed))


def comparable(plan):
    """A plan without the time that it took."""
    return plan.to_json() | {"plan_ms": 0}


def tokens_once(plan):
    """Asserts that every token goes forward once and backward once: the slices of a piece of a document
    follow each other on one data-parallel rank, or on the ranks that share it, forward from its start, and
    backward from its end where backward passes have packs of their own.

    Returns:
        Tokens of each piece, by its document and its first token there.
    """
    once = [m for m in plan.micro_batches if not m.merged or m.dp_rank == m.merged[0]]
    forward = _pieces([m for m in once if "F" in m.passes])
    backward = _pieces([m for m in once if "B" in m.passes][:: -1 if once[-1].passes == "B" else 1])
    assert forward == backward
    tokens = {piece: total for (piece, _), total in forward.items()}
    assert len(tokens) == len(forward), "slices of a document lie on ranks that do not share it"
    assert sum(tokens.values()) == plan.tokens == plan.document_lengths.sum()
    return tokens


def _pieces(packs):
    """Tokens of each piece and the first rank that has it, whose slices rise from pack to pack."""
    upto, totals = defaultdict(int), {}
    for m in packs:
        for number, length, (prefix, total) in zip(_numbers(m), m.lengths, m.slices.tolist(), strict=True):
            piece = number, m.dp_rank
            assert upto[piece] == prefix and totals.setdefault(piece, total) == total
            upto[piece] += length
    assert upto == totals
    return totals


def _numbers(m):
    """The piece of each row: its document, and its first token there."""
    return list(map(tuple, np.stack([m.documents[:, ID], m.documents[:, START] - m.prefix], axis=1).tolist()))


def assert_shares_cover(plan, context):
    """Asserts that the ranks that hold a pack have each place of its sequence once, and those that share it
    the same documents at the same place."""
    for m in plan.micro_batches:
        for other in (plan.of_rank(rank)[m.index] for rank in m.merged):
            assert m.dp_rank in m.merged == other.merged and other.length == m.length
            assert (other.documents == m.documents).all()
        if m.ranks is not None:
            assert len(m.ranks) == m.sharers * context
            positions = sequence_positions(m.ranks, m.lengths, m.shared_length)
            assert positions.shape == (len(m.ranks), m.length // context)
            assert sorted(positions.ravel().tolist()) == list(range(m.shared_length))


def left_waiting(plan, stages):
    """Runs the passes of all ranks, each when what it needs has run, and a shared one when all of its sharers
    are about to.

    Returns:
        Passes that never run, by the data-parallel and the pipeline rank that wait for them.
    """
    needed = [_last_forward(plan.of_rank(rank)) for rank in range(len(plan.flows))]
    for rank, flow in enumerate(plan.flows):
        assert check_slices(flow, plan.of_rank(rank)) == needed[rank]
    queues = {(dp, pp): list(own) for dp, flow in enumerate(plan.flows) for pp, own in enumerate(flow)}
    done = set()

    def ready(dp, action):
        kind, stage, place = action
        if kind == "F":
            return stage == 0 or (dp, "F", stage - 1, place) in done
        if stage == stages - 1:
            return (dp, "F", stage, needed[dp][place]) in done
        return (dp, "B", stage + 1, place) in done

    moved = True
    while moved:
        moved = False
        for (dp, pp), queue in queues.items():
            while queue:
                action = queue[0]
                sharers = plan.of_rank(dp)[action.place].merged or [dp]
                if not all(queues[one, pp][:1] == [action] and ready(one, action) for one in sharers):
                    break
                done |= {(one, *queues[one, pp].pop(0)) for one in sharers}
                moved = True
    return {ranks: list(map(str, queue)) for ranks, queue in queues.items() if queue}


def _last_forward(packs):
    """For each backward pass the last forward pass that has any of its documents, by their places."""
    last = {}
    for place, m in enumerate(packs):
        last |= dict.fromkeys(_numbers(m), place) if "F" in m.passes else {}
    return {place: max(map(last.get, _numbers(m))) for place, m in enumerate(packs) if "B" in m.passes}
