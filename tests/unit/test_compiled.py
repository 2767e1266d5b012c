"""Layers as they are compiled, in few graphs, and what selective checkpointing keeps and repeats."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from oracle import packed
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import ComplexRoPE, ScaledBiasRowwiseLinear
from torchtitan.models.common.attention import FusedQKVLinear
from torchtitan.models.common.linear import Linear
from trainers import Watch

from wlb_titan.runtime.attention.module import DocumentAttention, DocumentMask, documents_vary
from wlb_titan.runtime.models import checkpointing, compiling
from wlb_titan.runtime.models.bases import PairwiseRoPE, base_config, llama_spec
from wlb_titan.runtime.one_rank.dry_trace import Trace

pytestmark = pytest.mark.slow


def test_few_graphs_serve_every_length_and_number_of_documents():
    counter = CompileCounterWithBackend("aot_eager")
    module = DocumentAttention(DocumentAttention.Config())
    random = np.random.default_rng(0)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for _ in range(30):
        length = int(random.integers(16, 200))
        cuts = np.sort(random.choice(np.arange(1, length), size=random.integers(0, 4), replace=False))
        segments = packed(np.diff([0, *cuts, length]))
        q, k, v = torch.randn(3, 1, length, 2, 8).requires_grad_().unbind()
        out = compiled(q, k, v, attention_masks=DocumentMask(documents_vary(segments)))
        expected = module(q, k, v, attention_masks=DocumentMask(segments))
        assert torch.equal(out, expected)
        gradients = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected))
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert counter.frame_count == 2  # the first length, and all others; also with a single document


@pytest.mark.long
def test_a_bias_over_one_compiles_under_full_checkpointing():
    """gpt-oss' output projection without tensor parallelism, whose division by one Inductor leaves out."""
    linear = ScaledBiasRowwiseLinear.Config(in_features=8, out_features=8, bias=True).build()
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    block = torch.nn.Sequential(linear, torch.nn.Sigmoid())
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"0": block})})
    FullAC.Config().build().apply(model)
    block = model["layers"]["0"]
    torch._dynamo.reset()
    with inductor.patch(joint_custom_post_pass=compiling.KeepInputs()):
        compiled = torch.compile(block, fullgraph=True)
        x = torch.randn(4, 8, requires_grad=True)
        inputs = (x, *block.parameters())
        found, expected = (torch.autograd.grad(f(x).sum(), inputs) for f in (compiled, block))
    torch.testing.assert_close(found, expected)


def test_rotary_positions_are_compiled_into_one_with_the_split_of_qkv_each_way():
    """And are those of torchtitan's complex product."""
    torch.manual_seed(0)
    tokens, width, heads, key_heads, dim = 48, 8, 6, 3, 16
    wqkv = Linear.Config(in_features=width, out_features=(heads + 2 * key_heads) * dim)
    project = FusedQKVLinear.Config(head_dim=dim, n_heads=heads, n_kv_heads=key_heads, wqkv=wqkv).build()
    project = project.to(torch.bfloat16)
    x = torch.randn(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.cat([torch.arange(32), torch.arange(tokens - 32)]).unsqueeze(0)
    shapes = [(1, tokens, number, dim) for number in (heads, key_heads, key_heads)]
    weights = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    leaves = [x, *project.parameters()]

    def run(rope, compiled=False):
        rope = rope(dim=dim, max_seq_len=32, theta=100.0).build()

        def attention_inputs(x):
            q, k, v = project(x)
            return *rope(q, k, positions), v

        function = torch.compile(attention_inputs, fullgraph=True) if compiled else attention_inputs
        outputs = function(x)
        return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]

    expected = run(ComplexRoPE.Config)
    got, (forward, backward) = run_and_get_code(run, PairwiseRoPE.Config, True)
    for result in (run(PairwiseRoPE.Config), got):
        for one, other in zip(result, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2**-8, atol=1e-6)
    # Values, which are only copied, by themselves; and no other operation but a view of the table.
    kernels = [len(re.findall(r"^cpp_fused\w* = ", code, re.MULTILINE)) for code in (forward, backward)]
    assert kernels == [2, 1]
    assert set(re.findall(r"torch\.ops\.aten\.(\w+)\.default\(", forward + backward)) <= {"view_as_real"}


LAYERS, WIDTH, QKV, INNER, TOKENS = 4, 128, 256, 384, 48


def run(checkpointing, kinds=(), inner=INNER):
    """Outputs of matrix products that are kept by their width, products of the backward pass, gradients."""
    torch.manual_seed(0)
    config = llama_spec("debug").model
    for layer in config.layers:
        w1, w2, w3 = (getattr(layer.feed_forward, name) for name in ("w1", "w2", "w3"))
        w1.out_features = w2.in_features = w3.out_features = inner
    model = config.build()
    model.init_states()
    if checkpointing is not None:
        checkpointing.build().apply(model)
    mask = DocumentMask(packed([32, 16]), kinds=kinds)
    positions = torch.cat([torch.arange(32), torch.arange(16)]).unsqueeze(0)
    trace, watch = Trace(FakeTensorMode()), Watch()
    with trace:
        output = model(torch.arange(TOKENS).unsqueeze(0), positions=positions, attention_masks=mask)
    kept = {}
    for _, number, what in trace.now().largest:
        for width in (WIDTH, QKV, INNER):
            if f"aten.mm.default ({TOKENS}, {width})" in what:
                kept[width] = number
    with watch:
        output.square().mean().backward()
    return kept, watch.counted["aten.mm.default"], [p.grad for p in model.parameters()]


@pytest.mark.long
def test_w2s_output_is_not_kept_and_not_made_again():
    _, all_products, gradients = run(None)
    titans, titans_products, _ = run(SelectiveAC.Config())
    ours, our_products, our_gradients = run(checkpointing.SelectiveDocumentAC.Config())
    # Kept are QKV's and w1's outputs; of what is as wide as the model, wo's is not kept by either.
    assert titans == {QKV: LAYERS, INNER: LAYERS, WIDTH: LAYERS}
    assert ours == {QKV: LAYERS, INNER: LAYERS}
    # Made again are wo's and w3's outputs; torchtitan has kept w2's.
    assert our_products == all_products + 2 * LAYERS == titans_products
    torch.testing.assert_close(our_gradients, gradients)


@pytest.mark.parametrize("base", ["llama3_debug", "torchtitan.models.llama3.config_registry:llama3_8b"])
def test_our_bases_and_adopted_ones_checkpoint_so(base):
    built = base_config(base).activation_checkpoint.build()
    assert isinstance(built, checkpointing.AsNeededAC)
    assert set(checkpointing.NEVER_KEPT) < set(built.config.force_recompute_mm_shapes_by_fqns)


@pytest.mark.parametrize("inner", [INNER, WIDTH])
def test_keys_repeats_no_matrix_product(inner):
    """Nor where w2's weight has the shape of all others."""
    _, all_products, gradients = run(None, inner=inner)
    kept, products, own_gradients = run(checkpointing.KeysAC.Config(), inner=inner)
    assert kept[QKV] == LAYERS and sum(kept.values()) == 4 * LAYERS  # w1's, w3's and wo's, and never w2's
    assert products == all_products
    assert all(map(torch.equal, own_gradients, gradients))


@pytest.mark.parametrize("device,kept", [("cuda", True), ("cpu", False)])
def test_keys_keeps_what_moved_to_the_host(device, kept):
    """Or else the host would wait for its device again."""
    keeps = checkpointing._policy(torch.nn.Module(), set(), [])
    with FakeTensorMode():
        tensor = torch.empty(4, device=device)
        answer = keeps(None, torch.ops.aten._to_copy.default, tensor, device=torch.device("cpu"))
    assert (answer is CheckpointPolicy.MUST_SAVE) == kept


def test_each_layer_keeps_what_its_micro_batch_names():
    _, all_products, gradients = run(None)
    mixed = checkpointing.AsNeededAC.Config()
    kept, products, own_gradients = run(mixed, ("full", "selective", "keys", "none"))
    assert (kept[QKV], kept[INNER]) == (2, 1 + 2 + 2)  # without a kind rotated copies of the first are kept
    # Made again are all five outputs of the first layer, and wo's and w3's of the second.
    assert products == all_products + 5 + 2
    assert all(map(torch.equal, own_gradients, gradients))


@pytest.mark.long
def test_each_kind_has_one_compiled_graph():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = llama_spec("debug").model.build()
    model.init_states()
    checkpointing.AsNeededAC.Config().build().apply(model)
    for layer in model.layers.values():
        layer.compile(backend="aot_eager", fullgraph=True)
    names = ("none", "keys", "selective", "full")
    tokens = torch.arange(TOKENS).unsqueeze(0)
    mask = DocumentMask(documents_vary(packed([TOKENS])))
    for shift in range(LAYERS):
        kinds = tuple(names[(layer + shift) % len(names)] for layer in range(LAYERS))
        named = dataclasses.replace(mask, kinds=kinds)
        model(tokens, positions=tokens, attention_masks=named).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(names)
