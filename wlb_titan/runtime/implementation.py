"""Which implementation computes the job's attention, known and refused before anything is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torchtitan.config import TORCH_DTYPE_MAP

from wlb_titan.errors import UserError
from wlb_titan.kernels.implementations import Chosen, Device, chosen
from wlb_titan.runtime.shape import model_shape

if TYPE_CHECKING:
    from wlb_titan.runtime.trainer import Trainer


def check_implementation(config: Trainer.Config, device: Device | None = None) -> Chosen:
    """What computes forward and backward passes.

    Args:
        config: of the job.
        device: on which it runs; None where that is not known, as on the machine that submits it.

    Raises:
        UserError: it cannot run the model's attention.
    """
    wish = config.wlb.attention.implementation
    assert config.model_spec is not None
    shape = model_shape(config.model_spec.model)
    dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    if device is None:
        on_cpu = config.wlb.device == "cpu" or wish in (
            "auto",
            "reference",
        )  # which run there if nowhere else
        device = Device("cpu" if on_cpu else "cuda")
    try:
        return chosen(wish, (shape.head_dim, shape.v_head_dim or shape.head_dim), dtype, device)
    except ValueError as error:
        if device.type == "cuda" and dtype not in (torch.float16, torch.bfloat16):
            raise UserError(
                f"training.mixed_precision_param: the attention kernels take bfloat16, got {dtype}; set it "
                'to "bfloat16", or wlb.attention.implementation to "reference", which is slow.'
            ) from error
        raise UserError(f"wlb.attention.implementation: {error}.") from error
