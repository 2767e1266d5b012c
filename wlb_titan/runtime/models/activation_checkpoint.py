"""Selective activation checkpointing that knows our attention, and what no backward pass needs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.distributed import activation_checkpoint as titan

import wlb_titan.runtime.attention.kv_cache  # noqa: F401 - registers the ops named below

NEVER_KEPT = ("feed_forward.w2", "shared_experts.w2")
"""Linear layers whose output no backward pass needs, and which are as wide as the model: what follows adds it
to the residual. Under tensor parallelism it has the full width on every rank, before it is reduced."""


class SelectiveDocumentAC(titan.SelectiveAC):
    """torchtitan's SelectiveAC, which also keeps what document attention computed, and never w2's output.

    torchtitan keeps the output of every second matrix product. Counting them, w2 is the fifth of a layer with
    fused QKV and the seventh of others, so that it would be kept. The forward pass is repeated only as far as
    the backward pass needs it, which is to w2's input.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.SelectiveAC.Config):
        pass

    def __init__(self, config: Config, dump_folder: str = "") -> None:
        names = [*config.force_recompute_mm_shapes_by_fqns, *NEVER_KEPT]
        super().__init__(dataclasses.replace(config, force_recompute_mm_shapes_by_fqns=names), dump_folder)

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | {
            torch.ops.wlb_titan.varlen_attention.default,
            torch.ops.wlb_titan.sliced_attention.default,
        }

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        wrapped: Any = super()._wrap_block(module, base_fqn=base_fqn)
        wrapped.checkpoint_fn = partial(wrapped.checkpoint_fn, early_stop=True)
        return wrapped
