"""Selective activation checkpointing that knows our attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.distributed import activation_checkpoint as titan

import wlb_titan.kernels  # noqa: F401 - registers the op named below


class SelectiveDocumentAC(titan.SelectiveAC):
    """torchtitan's SelectiveAC, which also saves what document attention computed."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | {torch.ops.wlb_titan.varlen_attention.default}
