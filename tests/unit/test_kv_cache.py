"""Attention of slices against attention of the whole documents, in float64."""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from wlb_titan.kernels import varlen_attention

from wlb_titan.context.layout import segments, segments_after, whole_sequence
from wlb_titan.runtime.attention.kv_cache import KeyValueCache, sliced_attention

HEADS, KEY_HEADS, DIM = 4, 2, 8
LAYER = torch.tensor(0)


def tensors(tokens, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def make(heads):
        return torch.randn(tokens, heads, DIM, generator=generator, dtype=dtype).requires_grad_()

    return make(HEADS), make(KEY_HEADS), make(KEY_HEADS), make(HEADS).detach()


def with_sinks(out, lse):
    """What models with sinks make of the output, all sinks being 1: a function of the log-sum-exp too."""
    return out * torch.sigmoid(lse.T - 1).unsqueeze(-1)


def expected(lengths, q, k, v, weight, window=None, sinks=False):
    """Output and gradients of whole documents, each on its own."""
    lengths = np.array(lengths)
    own = torch.from_numpy(segments(whole_sequence(lengths), lengths))
    out, lse = varlen_attention(q, k, v, own, window=window, return_lse=True)
    out = with_sinks(out, lse) if sinks else out
    return out.detach(), torch.autograd.grad((out * weight).sum(), (q, k, v))


def packs_of(cuts, rides):
    """Packs of slices of document 0 and whole documents after the last: rows of (document, start, stop)."""
    packs = [[(0, a, b)] for a, b in itertools.pairwise(cuts)]
    packs[-1] += rides
    return packs


def forward(
    pack,
    lengths,
    begins,
    tensors,
    cache,
    padding,
    layer=LAYER,
    cut=(),
    window=None,
    sinks=False,
    attend=sliced_attention,
):
    """One pack's output, and the places of its tokens; `cut` are documents that another pass has in parts."""
    q, k, v, _ = tensors
    here = np.concatenate([np.arange(begins[d] + a, begins[d] + b) for d, a, b in pack])
    counts = np.array([b - a for _, a, b in pack])
    prefix = np.array([a for _, a, _ in pack])
    rows = [[d if d in cut or b - a < lengths[d] else -1, a, b - a, lengths[d]] for d, a, b in pack]
    seg = torch.from_numpy(segments_after(segments(whole_sequence(counts), counts), counts, prefix))
    own = [torch.nn.functional.pad(x[here], (0, 0, 0, 0, 0, padding)) for x in (q, k, v)]
    out, lse = attend(*own, seg, torch.tensor(rows), cache.number, layer, window=window)
    out, lse = out[: len(here)], lse[:, : len(here)]
    return with_sinks(out, lse) if sinks else out, here


def run(packs, lengths, tensors, padding=0, order=None, again=False, **options):
    """Outputs and gradients of all packs in the given order of backward passes."""
    begins = np.cumsum([0, *lengths])
    cache, losses, outputs = KeyValueCache(), [], {}
    q, k, v, weight = tensors
    for pack in packs:
        if again:
            out = checkpoint(
                lambda pack=pack: forward(pack, lengths, begins, tensors, cache, padding, **options)[0],
                use_reentrant=False,
            )
            here = np.concatenate([np.arange(begins[d] + a, begins[d] + b) for d, a, b in pack])
        else:
            out, here = forward(pack, lengths, begins, tensors, cache, padding, **options)
        losses.append((out * weight[here]).sum())
        outputs.update(zip(here.tolist(), out.detach(), strict=True))
    assert len(packs) == 1 or sum(x.nbytes for x in cache.tensors()) > 0
    for tensor in (q, k, v):
        tensor.grad = None
    for place in order or reversed(range(len(packs))):
        losses[place].backward()
    cache.check_empty()
    return torch.stack([outputs[i] for i in range(sum(lengths))]), (q.grad, k.grad, v.grad)


@given(
    cuts=st.lists(st.integers(1, 29), max_size=5, unique=True),
    rides=st.lists(st.integers(1, 9), max_size=3),
    padding=st.integers(0, 3),
    again=st.booleans(),
    window=st.none() | st.integers(1, 32),
    sinks=st.booleans(),
)
@settings(max_examples=25)
def test_slices_equal_the_whole_document(cuts, rides, padding, again, window, sinks):
    lengths = [30, *rides]
    cuts = [0, *sorted(cuts), 30]
    given_tensors = tensors(sum(lengths))
    options = {"window": window, "sinks": sinks}
    out, gradients = expected(lengths, *given_tensors, **options)
    packs = packs_of(cuts, [(i, 0, n) for i, n in enumerate(lengths) if i > 0])
    mine, mine_gradients = run(packs, lengths, given_tensors, padding, again=again, **options)
    torch.testing.assert_close(mine, out)
    for one, other in zip(mine_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other)


lines = st.lists(st.integers(1, 38), min_size=2, max_size=4, unique=True).map(sorted)


def pieces(lengths, cuts):
    """A line of documents, cut: rows of (document, start, stop) of each piece."""
    packs, begins = [], np.cumsum([0, *lengths])
    for a, b in itertools.pairwise([0, *cuts, sum(lengths)]):
        own = zip(begins, lengths, strict=False)
        ranges = [(d, max(a - begin, 0), min(b - begin, n)) for d, (begin, n) in enumerate(own)]
        packs.append([(d, start, stop) for d, start, stop in ranges if start < stop])
    return packs


def run_asymmetric(forwards, backwards, lengths, tensors, padding=0):
    """Gradients where backward passes have other packs, for which they compute the forward pass again."""
    cut = {d for pack in (*forwards, *backwards) for d, a, b in pack if b - a < lengths[d]}
    begins, cache, weight = np.cumsum([0, *lengths]), KeyValueCache(), tensors[3]
    with torch.no_grad():
        for pack in forwards:
            forward(pack, lengths, begins, tensors, cache, padding, cut=cut)
    for tensor in tensors[:3]:
        tensor.grad = None
    for pack in backwards:
        out, here = forward(pack, lengths, begins, tensors, cache, padding, cut=cut)
        (out * weight[here]).sum().backward()
    cache.check_empty()
    return [tensor.grad for tensor in tensors[:3]]


@given(forward_cuts=lines, backward_cuts=lines, padding=st.integers(0, 3))
@settings(max_examples=6)
def test_other_packs_backward_equal_the_whole_documents(forward_cuts, backward_cuts, padding):
    lengths = [20, 12, 3, 4]
    given_tensors = tensors(sum(lengths))
    _, gradients = expected(lengths, *given_tensors)
    backward = [pack[::-1] for pack in pieces(lengths[::-1], backward_cuts)[::-1]]
    backward = [[(len(lengths) - 1 - d, a, b) for d, a, b in pack] for pack in backward]
    forwards = pieces(lengths, forward_cuts)
    for one, other in zip(
        run_asymmetric(forwards, backward, lengths, given_tensors, padding), gradients, strict=True
    ):
        torch.testing.assert_close(one, other)


def test_gradients_of_bfloat16_are_added_up_in_float32():
    lengths = [64]
    in_bfloat16 = tensors(64, dtype=torch.bfloat16)
    exact = tuple(x.detach().double().requires_grad_() for x in in_bfloat16)
    _, gradients = expected(lengths, *exact)
    _, once = expected(lengths, *in_bfloat16)
    _, mine = run(packs_of(list(range(0, 65, 2)), []), lengths, in_bfloat16)

    def error(these):
        return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(these, gradients, strict=True))

    assert error(mine) < 1.5 * error(once)  # 32 slices round as one pass does


@pytest.mark.parametrize("order, due", [((0, 1, 2), 9), ((2, 0, 1), 6), ((2, 2, 1), 6)])
def test_a_wrong_order_of_backward_passes_is_caught(order, due):
    with pytest.raises(RuntimeError, match=f"tokens before {due} is due|second time"):
        run(packs_of([0, 3, 6, 9], []), [9], tensors(9), order=order)


def test_what_is_left_over_is_named_and_free_with_the_cache():
    cache = KeyValueCache()
    forward([(0, 0, 3)], [9], [0, 9], tensors(9), cache, 0)
    with pytest.raises(RuntimeError, match="Keys of 1 documents and layers are left"):
        cache.check_empty()
    kept = weakref.ref(cache)
    del cache
    gc.collect()
    assert kept() is None


def test_layers_do_not_mix():
    lengths, begins = [9], [0, 9]
    one, other = tensors(9, 1), tensors(9, 2)
    cache = KeyValueCache()
    for pack in packs_of([0, 4, 9], []):
        forward(pack, lengths, begins, one, cache, 0, torch.tensor(1))
        out, here = forward(pack, lengths, begins, other, cache, 0, torch.tensor(2))
        torch.testing.assert_close(out.detach(), expected(lengths, *other)[0][here])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_serves_all_prefixes(backend):
    torch._dynamo.reset()
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(sliced_attention, backend=counting, fullgraph=True, dynamic=True)
    lengths = [40]
    given_tensors = tensors(40, dtype=torch.float32)
    out, gradients = expected(lengths, *given_tensors)
    packs = packs_of([0, 8, 16, 24, 32, 40], [])
    mine, mine_gradients = run(packs, lengths, given_tensors, attend=compiled)
    torch.testing.assert_close(mine, out)
    for one, other in zip(mine_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert len(graphs) <= 2
