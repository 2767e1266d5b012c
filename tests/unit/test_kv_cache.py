"""Attention of slices against attention of the whole documents, in float64."""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import packed
from torch.utils.checkpoint import checkpoint
from wlb_titan.kernels import varlen_attention

from wlb_titan.context.layout import segments_after
from wlb_titan.runtime.attention.kv_cache import KeyValueCache, sliced_attention

HEADS, KEY_HEADS, DIM = 4, 2, 8


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
    out, lse = varlen_attention(q, k, v, packed(lengths), window=window, return_lse=True)
    out = with_sinks(out, lse) if sinks else out
    return out.detach(), torch.autograd.grad((out * weight).sum(), (q, k, v))


def pieces(lengths, cuts):
    """A line of documents, cut: rows of (document, start, stop) of each piece."""
    packs, begins = [], np.cumsum([0, *lengths])
    for a, b in itertools.pairwise([0, *cuts, sum(lengths)]):
        own = zip(begins, lengths, strict=False)
        ranges = [(d, max(a - begin, 0), min(b - begin, n)) for d, (begin, n) in enumerate(own)]
        packs.append([(d, start, stop) for d, start, stop in ranges if start < stop])
    return packs


class Sliced:
    """Attention of packs, rows of (document, start, stop); another pass has documents of `cut` in parts."""

    def __init__(self, lengths, tensors, padding=0, cut=(), window=None, sinks=False, attend=None):
        self.lengths, self.tensors, self.padding, self.cut = lengths, tensors, padding, cut
        self.window, self.sinks, self.attend = window, sinks, attend or sliced_attention
        self.begins, self.cache = np.cumsum([0, *lengths]), KeyValueCache()

    def places(self, pack):
        return np.concatenate([np.arange(self.begins[d] + a, self.begins[d] + b) for d, a, b in pack])

    def forward(self, pack, layer=0):
        """One pack's output."""
        here = self.places(pack)
        documents, prefix, stops = np.array(pack).T
        counts = stops - prefix
        in_parts = [d in self.cut or n < self.lengths[d] for d, n in zip(documents, counts, strict=True)]
        marked = np.where(in_parts, documents, -1)
        rows = np.stack([marked, prefix, counts, np.take(self.lengths, documents)], axis=1)
        seg = torch.from_numpy(segments_after(packed(counts).numpy(), counts, prefix))
        own = [torch.nn.functional.pad(x[here], (0, 0, 0, 0, 0, self.padding)) for x in self.tensors[:3]]
        numbers = torch.from_numpy(rows), self.cache.number, torch.tensor(layer)
        out, lse = self.attend(*own, seg, *numbers, window=self.window)
        out, lse = out[: len(here)], lse[:, : len(here)]
        return with_sinks(out, lse) if self.sinks else out

    def loss(self, pack, out):
        return (out * self.tensors[3][self.places(pack)]).sum()

    def gradients(self, losses):
        """Of q, k and v, after backward passes in this order."""
        for tensor in self.tensors[:3]:
            tensor.grad = None
        for loss in losses:
            loss.backward()
        self.cache.check_empty()
        return tuple(tensor.grad for tensor in self.tensors[:3])


def run(packs, lengths, tensors, order=None, again=False, **options):
    """Outputs and gradients of all packs, by this order of backward passes; `again`: two forward passes."""
    sliced, losses = Sliced(lengths, tensors, **options), []
    outputs = torch.empty_like(tensors[0])
    for pack in packs:
        out = checkpoint(sliced.forward, pack, use_reentrant=False) if again else sliced.forward(pack)
        losses.append(sliced.loss(pack, out))
        outputs[sliced.places(pack)] = out
    assert len(packs) == 1 or sum(x.nbytes for x in sliced.cache.tensors()) > 0
    return outputs.detach(), sliced.gradients(losses[i] for i in order or reversed(range(len(packs))))


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
    """Of a document in slices, the last of which shares its pack with whole documents."""
    lengths = [30, *rides]
    given_tensors = tensors(sum(lengths))
    options = {"window": window, "sinks": sinks}
    mine = run(pieces(lengths, sorted(cuts)), lengths, given_tensors, padding=padding, again=again, **options)
    torch.testing.assert_close(mine, expected(lengths, *given_tensors, **options))


lines = st.lists(st.integers(1, 38), min_size=2, max_size=4, unique=True).map(sorted)


@given(forward_cuts=lines, backward_cuts=lines, padding=st.integers(0, 3))
@settings(max_examples=6)
def test_other_packs_backward_equal_the_whole_documents(forward_cuts, backward_cuts, padding):
    """Backward passes compute the forward pass of their packs again."""
    lengths = [20, 12, 3, 4]
    given_tensors = tensors(sum(lengths))
    backwards = [pack[::-1] for pack in pieces(lengths[::-1], backward_cuts)[::-1]]
    backwards = [[(len(lengths) - 1 - d, a, b) for d, a, b in pack] for pack in backwards]
    forwards = pieces(lengths, forward_cuts)
    cut = {d for pack in (*forwards, *backwards) for d, a, b in pack if b - a < lengths[d]}
    sliced = Sliced(lengths, given_tensors, padding, cut)
    with torch.no_grad():
        for pack in forwards:
            sliced.forward(pack)
    mine = sliced.gradients(sliced.loss(pack, sliced.forward(pack)) for pack in backwards)
    torch.testing.assert_close(mine, expected(lengths, *given_tensors)[1])


def test_gradients_of_bfloat16_are_added_up_in_float32():
    lengths = [64]
    in_bfloat16 = tensors(64, dtype=torch.bfloat16)
    exact = tuple(x.detach().double().requires_grad_() for x in in_bfloat16)
    _, gradients = expected(lengths, *exact)
    _, once = expected(lengths, *in_bfloat16)
    _, mine = run(pieces(lengths, range(2, 64, 2)), lengths, in_bfloat16)

    def error(these):
        return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(these, gradients, strict=True))

    assert error(mine) < 1.5 * error(once)  # 32 slices round as one pass does


@pytest.mark.parametrize("order, due", [((0, 1, 2), 9), ((2, 0, 1), 6), ((2, 2, 1), 6)])
def test_a_wrong_order_of_backward_passes_is_caught(order, due):
    with pytest.raises(RuntimeError, match=f"tokens before {due} is due|second time"):
        run(pieces([9], [3, 6]), [9], tensors(9), order=order)


def test_what_is_left_over_is_named_and_free_with_the_cache():
    sliced = Sliced([9], tensors(9))
    sliced.forward([(0, 0, 3)])
    with pytest.raises(RuntimeError, match="Keys of 1 documents and layers are left"):
        sliced.cache.check_empty()
    kept = weakref.ref(sliced.cache)
    del sliced
    gc.collect()
    assert kept() is None


def test_layers_do_not_mix():
    one, other = (Sliced([9], tensors(9, seed)) for seed in (1, 2))
    other.cache = one.cache
    out, _ = expected([9], *other.tensors)
    for pack in pieces([9], [4]):
        one.forward(pack, layer=1)
        torch.testing.assert_close(other.forward(pack, layer=2), out[other.places(pack)])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_serves_all_prefixes(backend):
    torch._dynamo.reset()
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(sliced_attention, backend=counting, fullgraph=True, dynamic=True)
    given_tensors = tensors(40, dtype=torch.float32)
    mine = run(pieces([40], [8, 16, 24, 32]), [40], given_tensors, attend=compiled)
    torch.testing.assert_close(mine, expected([40], *given_tensors))
    assert len(graphs) <= 2
