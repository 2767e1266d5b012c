"""Experts count each token once, whatever layers recompute, and so their balance is the same."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torchtitan.distributed.activation_checkpoint import FullAC
from trainers import Watch

from wlb_titan.runtime.attention.module import DocumentMask
from wlb_titan.runtime.models import checkpointing
from wlb_titan.runtime.models.bases import base_config
from wlb_titan.runtime.models.weights import build_optimizers

pytestmark = pytest.mark.slow

KINDS = {"selective": checkpointing.SelectiveDocumentAC, "keys": checkpointing.KeysAC, "full": FullAC}
KINDS["mix"] = checkpointing.AsNeededAC
MIXES = (("none", "full"), ("keys", "selective"))  # of two layers, by micro-batch
LENGTH = 24


def built(kind):
    config = base_config("torchtitan.models.qwen3.config_registry:qwen3_moe_debug")
    torch.manual_seed(0)
    model = replace(config.model_spec.model, layers=config.model_spec.model.layers[:2]).build()
    model.init_weights()
    checkpointing.count_once(model)
    if kind:
        KINDS[kind].Config().build().apply(model)
    return model


def loss(model, kinds=()):
    """Of a document of random tokens."""
    ids, mask = torch.randint(0, 100, (1, LENGTH)), torch.tensor([[0, LENGTH] * 2], dtype=torch.int32)
    return model(ids, torch.arange(LENGTH)[None], DocumentMask(mask, kinds=kinds)).float().square().mean()


def balanced(kind, *, compiled=False):
    """Counts (2, experts) of two micro-batches and a validation, which counts none; the bias after a step."""
    torch._dynamo.reset()
    model = built(kind)
    if compiled:
        for block in model.layers.values():
            block.compile(backend="aot_eager", fullgraph=True)
    optimizers = build_optimizers(base_config("llama3_debug").optimizer, [model])
    alone = SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False, tp=1)
    checkpointing.balance_experts(optimizers, [model], alone)
    for mix in MIXES:
        loss(model, mix if kind == "mix" else ()).backward()
    model.eval()
    with torch.no_grad():
        loss(model)
    model.train()
    experts = [block.moe for block in model.layers.values()]
    counts = torch.stack([moe.tokens_per_expert_E.clone() for moe in experts])
    optimizers.step()
    return counts, torch.stack([moe.expert_bias_E for moe in experts]), experts[0].router.top_k


@pytest.fixture(scope="module")
def expected():
    counts, bias, top_k = balanced(None)
    assert counts.sum(dim=1).tolist() == [len(MIXES) * LENGTH * top_k] * 2 and bias.any()
    assert (counts % 2 == 1).any(), "or halving loses nothing"
    return counts, bias


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_experts_are_balanced_as_if_nothing_was_recomputed(expected, kind, compiled):
    counts, bias, _ = balanced(kind, compiled=compiled)
    assert torch.equal(counts, expected[0]) and torch.equal(bias, expected[1])


def repeated_products(kind):
    """Of experts, in a backward pass beside the six for gradients of a layer."""
    model = built(kind)
    found = loss(model)
    with Watch() as watch:
        found.backward()
    return watch.counted["aten._grouped_mm.default"] - 6 * len(model.layers)


def test_keys_repeats_no_product_of_experts():
    assert [repeated_products(kind) for kind in (None, "keys", "full")] == [0, 0, 6]
