"""Keys that travel among pairs, among all ranks or not at all give what one process gives: attention over
ragged documents on ranks of context parallelism, in float64, under several shardings; and the same to the bit
where heads attend in groups, one of which travels while another attends, in eager and in compiled code."""

from functools import cache, partial

import numpy as np
import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from lab import Cases
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from wlb_titan.kernels import varlen_attention

from wlb_titan.context.hybrid import levels_of
from wlb_titan.context.layout import segments, sequence_positions, whole_sequence
from wlb_titan.context.strategy import STRATEGIES, MoveSeconds
from wlb_titan.cost.attention_kernels import hopper
from wlb_titan.plan import Slices
from wlb_titan.runtime.attention.exchange import AllGatherAttention
from wlb_titan.runtime.attention.module import Attend, DocumentMask
from wlb_titan.runtime.dataloader import on_host
from wlb_titan.runtime.meshes import submesh
from wlb_titan.runtime.models.compiling import late_waits


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
    expected, sums = varlen_attention(*alone, torch.from_numpy(whole), return_lse=True)
    expected_gradients = torch.autograd.grad((expected, sums), alone, (gradient, torch.cos(sums)))
    own = torch.from_numpy(sequence_positions(sharding, lengths, total)[rank])
    mask = strategy.mask(sharding, lengths, total, rank, slices)
    mine = [x.detach()[own].requires_grad_() for x in everything]
    attention = AllGatherAttention(config, *meshes(ranks, strategy.levels))
    exchange = tree_map_only(np.ndarray, on_host, mask.exchange)

    def attended(groups, call=lambda attend, *x: attend(*x)):
        attend = Attend(DocumentMask(torch.from_numpy(mask.segments), groups=groups), [None] * 2, {})
        out, lse = call(partial(attention, exchange=exchange, attend=attend, wants_lse=True), *mine)
        return [out, *torch.autograd.grad((out, lse), mine, (gradient[own], torch.cos(lse)))], lse

    found, lse = attended(1)
    for call in (lambda attend, *x: attend(*x), partial(checkpoint, use_reentrant=False)):
        both = attended(2, call)
        same = all(map(torch.equal, [*both[0], both[1]], [*found, lse]))
        assert same, "heads in groups give something else"
    pairs = zip(found, (expected, *expected_gradients), strict=True)
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


CALLS = {
    "_c10d_functional::all_gather_into_tensor": "gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce",
    "_c10d_functional::wait_tensor": "wait",
    "wlb_titan::varlen_attention": "attend",
    "wlb_titan::varlen_attention_backward": "attend back",
}


def run_order(*, name, words, groups):
    """Every rank's calls in order, forward and backward, of attention in groups: eager and compiled."""
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    lengths, total = np.array([60, 4]), 64
    config = STRATEGIES.configure("per_document")
    strategy = config.make(ranks, hopper(16, 4))
    _, sharding = strategy.shard(lengths, total)
    mask = strategy.mask(sharding, lengths, total, rank)
    attention, exchange = AllGatherAttention(config, *meshes(ranks, strategy.levels)), mask.exchange
    attend = Attend(DocumentMask(torch.from_numpy(mask.segments), groups=groups), [None] * groups, {})
    exchange = tree_map_only(np.ndarray, on_host, exchange)
    mine = [torch.randn(total // ranks, 4, 16, requires_grad=True) for _ in range(3)]

    def layer(*x):
        return attention(*(2 * one for one in x), exchange, attend, wants_lse=False)[0] * 3

    changed = {"reorder_for_compute_comm_overlap": True, "force_disable_caches": True}
    changed["reorder_for_compute_comm_overlap_passes"] = [late_waits]
    seen = []
    for call in (layer, torch.compile(layer, fullgraph=True)):
        with torch._inductor.config.patch(**changed):
            call(*mine).sum().backward()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            gradients = torch.autograd.grad(call(*mine).sum(), mine)
            [gradient + 0 for gradient in gradients]
        events = sorted(found.events(), key=lambda event: event.time_range.start)
        seen.append([CALLS[event.name] for event in events if event.name in CALLS])
    everyone = [None] * ranks
    dist.all_gather_object(everyone, seen)
    return everyone


@pytest.fixture(scope="module")
def results(fork_server, tmp_path_factory):
    results = Cases(fork_server, tmp_path_factory.mktemp("gathered"))
    results.add("gather", {"cp2": {}, "cp4": {}})
    results.add("order", {"cp2 compiled": {"groups": 4}})
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


def test_keys_travel_while_other_heads_attend(results):
    """All gathers begin first; a group's gradients travel while the next group goes back."""
    forward = [*["gather"] * 4, *["wait", "attend"] * 4]
    order = [*forward, *["attend back", "reduce"] * 4, *["wait"] * 4]
    eager_and_compiled = [order, order]
    assert results["cp2 compiled"] == [eager_and_compiled] * 2
