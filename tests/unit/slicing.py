"""Planners under `slim` for tests, and what holds for plans of it and of every other policy."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
from planning import FULL, NONE, job

from wlb_titan.context.layout import sequence_positions
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
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
    """Asserts that all that the planner's stream gave was trained once, was lost or waits: every token of
    every document at most once, and all of those long past exactly once."""
    trained = {}
    for plan in plans:
        pieces = tokens_once(plan)
        assert not trained.keys() & pieces.keys()
        trained |= pieces
    for ((document, start), total), ((following, then), _) in pairwise(sorted(trained.items())):
        assert document < following or start + total <= then, document
    ids, starts = np.array(list(trained)).T
    assert (starts + list(trained.values()) <= planner._stream.lengths_of(ids)).all()
    lost = sum(plan.lost_tokens for plan in plans)
    cursor = planner._stream.state_dict()
    streamed = int(planner._stream.lengths_of(np.arange(cursor["document"])).sum()) + cursor["offset"]
    left = plans[-1].waiting_tokens + int(cursor["first"][:, LENGTH].sum())
    assert sum(trained.values()) + lost + left == streamed


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
        whole = [(0, length) for length in m.lengths]
        slices = whole if m.slices is None else m.slices.tolist()
        for number, length, (prefix, total) in zip(_numbers(m), m.lengths, slices, strict=True):
            piece = number, m.dp_rank
            assert length > 0 and upto[piece] == prefix and totals.setdefault(piece, total) == total
            upto[piece] += length
    assert upto == totals
    return totals


def _numbers(m):
    """The piece of each row: its document, and its first token there."""
    before = 0 if m.prefix is None else m.prefix
    return list(map(tuple, np.stack([m.documents[:, ID], m.documents[:, START] - before], axis=1).tolist()))


def assert_shares_cover(plan, context):
    """Asserts that ranks have each place of a pack's sequence once, and that those that share it agree."""
    for m in plan.micro_batches:
        for other in (plan.of_rank(rank)[m.index] for rank in m.merged):
            assert m.dp_rank in m.merged == other.merged and other.length == m.length
            assert (other.documents == m.documents).all()
        if m.ranks is not None:
            assert len(m.ranks) == m.sharers * context
            positions = sequence_positions(m.ranks, m.lengths, m.shared_length)
            assert positions.shape == (len(m.ranks), m.length // context)
            assert sorted(positions.ravel().tolist()) == list(range(m.shared_length))


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
