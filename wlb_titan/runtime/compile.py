"""torch.compile for micro-batches whose lengths change at every step.

A compiled transformer block is compiled once for each length that it meets: with symbolic lengths torch 2.15
cannot trace a backward pass through DTensors (a symbol ends up as its own argument, and tracing it never
ends). So lengths are kept few; see lengths.py.
What else changes from step to step, the documents, is one tensor with a dynamic number of rows.
"""

from __future__ import annotations

import torch
import torch._dynamo


def compile_each_length(lengths: int) -> None:
    """Has torch.compile make code for each length, at most `lengths` of them; more are an error.

    It sets torch.compile's own configuration for the process, as torchtitan does.
    """
    torch._dynamo.config.automatic_dynamic_shapes = False
    # Each length in training and evaluation, with one document (a dimension of 1 is never dynamic) and more.
    torch._dynamo.config.recompile_limit = 4 * lengths


def documents_vary(segments: torch.Tensor) -> torch.Tensor:
    """The same tensor, (S, 4), whose number of rows S compiled code takes as a variable."""
    torch._dynamo.maybe_mark_dynamic(segments, 0)
    return segments
