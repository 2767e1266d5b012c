"""Keys that travel among pairs, among all ranks or not at all give what one process gives: attention over
ragged documents on ranks of context parallelism, in float64, under several shardings."""

from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lab import Cases
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only
from wlb_titan.kernels import varlen_attention

from wlb_titan.context.hybrid import levels_of
from wlb_titan.context.layout import segments, sequence_positions, whole_sequence
from wlb_titan.context.strategy import STRATEGIES, MoveSeconds
from wlb_titan.cost.attention_kernels import hopper
from wlb_titan.plan import Slices
from wlb_titan.runtime.attention.exchange import AllGatherAttention
from wlb_titan.runtime.dataloader import on_host
from wlb_titan.runtime.meshes import submesh


@cache
def meshes(ranks, levels):
    return [submesh(np.arange(ranks), {"cp": size}) for size in levels]


def difference(policy, lengths, token_seconds, sliced, mesh):
    """Of this rank's outputs and gradients from those of one process; and whether each level was used. Every
    other document may be the first slice of a longer one."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    tokens = int(lengths.sum())
    total = -(-tokens // (2 * ranks)) * 2 * ranks
    config = STRATEGIES.configure(policy)
    moves = [MoveSeconds(token_seconds, 0.0)] * len(levels_of(ranks))
    strategy = config.make(ranks, hopper(16, 4), moves)
    cached = np.arange(len(lengths)) % 2 == 0
    slices = Slices(np.zeros_like(lengths), cached) if sliced else None
    _, sharding = strategy.shard(lengths, total, slices=slices)
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(total), dtype=torch.float64)
    shapes = ((4, 16), (2, 16), (2, 8), (4, 8))  # of q, k, v and the output's gradient
    *everything, gradient = (draw(total, *shape) for shape in shapes)
    gradient[tokens:] = 0
    alone, whole = [x.requires_grad_() for x in everything], segments(whole_sequence(lengths), lengths)
    expected, _ = varlen_attention(*alone, torch.from_numpy(whole), return_lse=True)
    expected_gradients = torch.autograd.grad(expected, alone, gradient)
    own = torch.from_numpy(sequence_positions(sharding, lengths, total)[rank])
    mask = strategy.mask(sharding, lengths, total, rank, slices)
    mine = [x.detach()[own].requires_grad_() for x in everything]
    attend = partial(varlen_attention, segments=torch.from_numpy(mask.segments), return_lse=True)
    exchange = tree_map_only(np.ndarray, on_host, mask.exchange)
    attention = AllGatherAttention(config, *meshes(ranks, strategy.levels))
    out, _ = attention(*mine, exchange, attend, wants_lse=False)
    gradients = torch.autograd.grad(out, mine, gradient[own])
    pairs = zip((out, *gradients), (expected, *expected_gradients), strict=True)
    # A rank may have nothing but padding.
    worst = max(float(((a - b[own]) * (own < tokens)[:, None, None]).detach().abs().max()) for a, b in pairs)
    return worst, [len(level.order) > 0 for level in mask.exchange.levels]


def run_gather(*, name, words):
    """Of every rank and case the largest difference, and which levels of groups had something to exchange."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    random = np.random.default_rng(0)
    cases = [[700], [5, 3], [40] * 16, [600, *[20] * 9], [333, 1, 300, 7, 64]]
    cases += [random.choice([1, 2, 3, 7, 30, 64, 200, 333], number) + 1 for number in (2, 5, 9, 13)]
    results = []
    for lengths in map(np.array, cases):
        for policy in ("hybrid", "per_sequence"):
            for slow, sliced in ((1e-9, False), (1e-5, False), (1e-5, True)):
                worst, used = difference(policy, lengths, slow, sliced, mesh)
                case = {"policy": policy, "lengths": lengths.tolist(), "sliced": sliced}
                results.append({**case, "worst": worst, "used": used})
    everyone = [None] * mesh.size()
    dist.all_gather_object(everyone, results)
    return [result for rank in everyone for result in rank]


@pytest.fixture(scope="module")
def results(fork_server, tmp_path_factory):
    results = Cases(fork_server, tmp_path_factory.mktemp("gathered"))
    results.add("gather", {"cp2": {}, "cp4": {}})
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_equals_one_process(results, ranks):
    found = results[f"cp{ranks}"]
    assert len(found) > 50 * ranks
    assert not [result for result in found if not result["worst"] < 1e-12]
    assert all(result["used"][-1] for result in found if result["sliced"])
    whole = [result for result in found if result["policy"] == "hybrid" and not result["sliced"]]
    used = {tuple(result["used"]) for result in whole}
    if ranks == 2:
        assert used == {(False,), (True,)}
    else:  # nothing, all four ranks, and pairs besides
        assert used >= {(False, False), (False, True), (True, True)}
