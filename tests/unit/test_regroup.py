"""From the shares of forward micro-batches to those of backward micro-batches, token by token."""

import numpy as np
import pytest
from slicing import PACKINGS, planner

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()


from wlb_titan.context.layout import sequence_positions  # noqa: E402
from wlb_titan.context.strategy import STRATEGIES  # noqa: E402
from wlb_titan.cost.degrees import Degrees  # noqa: E402
from wlb_titan.packing.slim.asymmetric import token_moves  # noqa: E402
from wlb_titan.plan import LENGTH  # noqa: E402

pytestmark = pytest.mark.slow


def share(micro_batch, tensor_ranks, rank):
    """What a rank holds: (document, its token) of each place of its share, None where it is padding."""
    rows = zip(micro_batch.documents.tolist(), micro_batch.documents[:, LENGTH], strict=True)
    tokens = [(id_, start + i) for (id_, start, _, _), n in rows for i in range(n)]
    tokens += [None] * micro_batch.padding
    if micro_batch.ranks is None:
        held = np.arange(len(tokens))
    else:
        lengths = micro_batch.documents[:, LENGTH]
        held = sequence_positions(micro_batch.ranks, lengths, len(tokens))[rank // tensor_ranks]
    own = held.reshape(tensor_ranks, -1)[rank % tensor_ranks]
    return [tokens[place] for place in own]


@pytest.mark.parametrize("context, tensor", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_every_rank_gets_the_tokens_of_its_share(context, tensor):
    lengths = np.random.default_rng(context + tensor).integers(2, 90, size=40)
    degrees = Degrees(pipeline=2, context=context)
    facts = {"degrees": degrees, "sharding": STRATEGIES.configure("per_document"), "multiple": tensor}
    planned = planner(lengths, PACKINGS["asymmetric"], **facts)
    ranks = context * tensor
    for _ in range(2):
        plan = planned.next()
        packs = plan.of_rank(0)
        forward, backward = plan.forward, packs[len(plan.forward) :]
        ways = [token_moves(packs, tensor, rank) for rank in range(ranks)]
        held = [{i: share(m, tensor, rank) for i, m in enumerate(forward)} for rank in range(ranks)]
        for place, m in enumerate(backward):
            arrives = [[] for _ in range(ranks)]  # at each rank, by the ranks that send
            for rank, way in enumerate(ways):
                rows = [token for source in way[place].sources for token in held[rank][source]]
                parts = np.split(way[place].sent, np.cumsum(way[place].sent_counts)[:-1])
                for receiver, own in enumerate(parts):
                    arrives[receiver].append([rows[i] for i in own])
            for rank, way in enumerate(ways):
                assert way[place].received_counts == [len(part) for part in arrives[rank]]
                mine = [None] * (m.length // ranks)
                came = [token for part in arrives[rank] for token in part]
                for where, token in zip(way[place].places.tolist(), came, strict=True):
                    mine[where] = token
                assert mine == share(m, tensor, rank)
                for source in way[place].over:
                    del held[rank][source]
        for own in held:
            assert all(set(left) == {None} for left in own.values())  # padding, which nobody asks for
