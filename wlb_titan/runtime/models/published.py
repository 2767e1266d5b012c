"""The base of a published model, by its config.json from Hugging Face's hub."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

from torchtitan.trainer import Trainer as TorchtitanTrainer

from wlb_titan.errors import UserError
from wlb_titan.runtime.checks.weights import differences, read_description

REGISTRIES = ("torchtitan.models.llama3.config_registry", "torchtitan.models.qwen3.config_registry")


def base_of(path: Path, base_config: Callable[[str], TorchtitanTrainer.Config]) -> TorchtitanTrainer.Config:
    """The first base that differs in nothing that the config.json tells.

    Args:
        base_config: makes a base of its name.

    Raises:
        UserError: the file cannot be read, or there is none.
    """
    try:
        theirs = read_description(path)
    except (OSError, ValueError) as error:
        raise UserError(f"the base {str(path)!r} cannot be read: {error}.") from error
    for module in REGISTRIES:
        for name, function in inspect.getmembers(importlib.import_module(module), inspect.isfunction):
            if function.__module__ != module or inspect.signature(function).parameters:
                continue
            try:
                config = base_config(f"{module}:{name}")
            except UserError:
                continue
            assert config.model_spec is not None
            if not differences(config.model_spec.model, theirs):
                return config
    raise UserError(
        f"torchtitan has no base of the model that {str(path)!r} describes; name a registry function of your "
        'own, as "package.module:function".'
    )
