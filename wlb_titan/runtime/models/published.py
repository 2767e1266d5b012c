"""The base of torchtitan's that has the sizes of a published model."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace

from wlb_titan.cost.models import ModelShape
from wlb_titan.errors import UserError
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

REGISTRIES = ("torchtitan.models.llama3.config_registry", "torchtitan.models.qwen3.config_registry")


def base_of(shape: ModelShape) -> str:
    """The name of the first base with these sizes.

    Raises:
        UserError: there is none.
    """
    use_cpu_without_accelerator()
    from wlb_titan.runtime.models.registry import base_config
    from wlb_titan.runtime.shape import model_shape

    for module in REGISTRIES:
        for name, function in inspect.getmembers(importlib.import_module(module), inspect.isfunction):
            if function.__module__ != module or inspect.signature(function).parameters:
                continue
            try:
                config = base_config(f"{module}:{name}")
            except UserError:
                continue
            assert config.model_spec is not None
            sizes = replace(model_shape(config.model_spec.model), projections=None, tied=shape.tied)
            if sizes == shape:
                return f"{module}:{name}"
    raise UserError(
        "torchtitan has no base of this model's sizes, so that no TOML file could train it. Plans and "
        "predictions hold; `--write megatron` prints the winner as arguments of Megatron-LM."
    )
