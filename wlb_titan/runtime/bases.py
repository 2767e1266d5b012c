"""Bases of sizes that torchtitan has but no function for: `base = "wlb_titan.runtime.bases:qwen3_8b"`."""

from __future__ import annotations

from torchtitan.models.qwen3 import model_registry
from torchtitan.models.qwen3.config_registry import qwen3_14b
from torchtitan.trainer import Trainer


def qwen3_8b() -> Trainer.Config:
    """Qwen3 8B with torchtitan's settings for 14B; both have a vocabulary of 151,936."""
    config = qwen3_14b()
    config.model_spec = model_registry("8B")
    return config
