"""A compiled module meets few lengths and any documents."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

from wlb_titan.planner import sharding  # noqa: E402
from wlb_titan.runtime.attention import DocumentAttention, DocumentMask  # noqa: E402
from wlb_titan.runtime.compile import compile_each_length, documents_vary  # noqa: E402
from wlb_titan.runtime.lengths import coarser  # noqa: E402


@pytest.mark.parametrize("most", [16, 64])
@pytest.mark.parametrize("window", [512, 1000, 4096, 131072])
@pytest.mark.parametrize("divisor", [1, 2, 3, 8, 24, 256])
def test_lengths_are_few_and_fit_the_window(window, divisor, most):
    multiple = coarser(divisor, window, most)
    assert multiple % divisor == 0
    if window % divisor == 0:
        assert window % multiple == 0
        assert window // multiple <= most
    else:
        assert multiple == divisor


def test_the_default_of_compiled_models_is_a_sixteenth_of_the_window():
    assert coarser(8, 131072, 16) == 8192


def random_documents(random, tokens):
    cuts = np.sort(random.choice(np.arange(1, tokens), size=random.integers(0, 9), replace=False))
    return np.diff([0, *cuts, tokens])


def test_each_length_is_compiled_once_whatever_the_documents():
    counter = CompileCounterWithBackend("aot_eager")
    module = DocumentAttention(DocumentAttention.Config())
    random, lengths = np.random.default_rng(0), [32, 64, 96]
    with torch._dynamo.config.patch(
        automatic_dynamic_shapes=True, recompile_limit=8
    ):  # puts back what compile_each_length sets
        compile_each_length(len(lengths))
        torch._dynamo.reset()
        compiled = torch.compile(module, backend=counter, fullgraph=True)
        for step in range(30):
            length = lengths[step % 3]
            documents = random_documents(random, length)
            segments = torch.from_numpy(sharding.segments(sharding.whole(documents), documents))
            q, k, v = torch.randn(3, 1, length, 2, 8)
            out = compiled(q, k, v, attention_masks=DocumentMask(documents_vary(segments)))
            assert torch.equal(out, module(q, k, v, attention_masks=DocumentMask(segments)))
    # A single document is a constant dimension of 1, so it may take a second compilation.
    assert counter.frame_count <= 2 * len(lengths)
