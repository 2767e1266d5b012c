"""Selective checkpointing: what it keeps of a model's forward pass, what it repeats, and its gradients."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

pytestmark = pytest.mark.slow

use_cpu_without_accelerator()

LAYERS, WIDTH, QKV, INNER, TOKENS = 4, 128, 256, 384, 48


class Products(TorchDispatchMode):
    """Counts matrix products."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def run(checkpointing):
    """Outputs of matrix products that are kept by their width, products of the backward pass, gradients."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from wlb_titan.context import layout
    from wlb_titan.runtime.attention.module import DocumentMask
    from wlb_titan.runtime.models.bases import llama_spec
    from wlb_titan.runtime.one_rank.dry_trace import Trace

    torch.manual_seed(0)
    model = llama_spec("debug").model.build()
    model.init_states()
    if checkpointing is not None:
        checkpointing.build().apply(model)
    lengths = torch.tensor([32, 16]).numpy()
    mask = DocumentMask(torch.from_numpy(layout.segments(layout.whole_sequence(lengths), lengths)))
    positions = torch.cat([torch.arange(32), torch.arange(16)]).unsqueeze(0)
    trace, products = Trace(FakeTensorMode()), Products()
    with trace:
        output = model(torch.arange(TOKENS).unsqueeze(0), positions=positions, attention_masks=mask)
    kept = {}
    for _, number, what in trace.now().largest:
        for width in (WIDTH, QKV, INNER):
            if f"aten.mm.default ({TOKENS}, {width})" in what:
                kept[width] = number
    with products:
        output.square().mean().backward()
    return kept, products.number, [p.grad for p in model.parameters()]


def test_w2s_output_is_not_kept_and_not_made_again():
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    from wlb_titan.runtime.models.blocks import SelectiveDocumentAC

    _, all_products, gradients = run(None)
    titans, titans_products, _ = run(SelectiveAC.Config())
    ours, our_products, our_gradients = run(SelectiveDocumentAC.Config())
    # Kept are QKV's and w1's outputs; of what is as wide as the model, wo's is not kept by either.
    assert titans == {QKV: LAYERS, INNER: LAYERS, WIDTH: LAYERS}
    assert ours == {QKV: LAYERS, INNER: LAYERS}
    # Made again are wo's and w3's outputs; torchtitan has kept w2's.
    assert our_products == all_products + 2 * LAYERS == titans_products
    torch.testing.assert_close(our_gradients, gradients)


@pytest.mark.parametrize(
    "base", ["llama3_debug", "torchtitan.models.llama3.config_registry:llama3_debugmodel"]
)
def test_our_bases_and_adopted_ones_have_it(base):
    from wlb_titan.runtime.models.bases import base_config
    from wlb_titan.runtime.models.blocks import NEVER_KEPT

    checkpointing = base_config(base).activation_checkpoint.build()
    assert set(NEVER_KEPT) < set(checkpointing.config.force_recompute_mm_shapes_by_fqns)
