"""Base configurations: what a TOML file's `base` key names.

A base is a function without arguments that returns a torchtitan Trainer.Config. Ours are the functions
below, by their short names; any other is named "package.module:function", torchtitan's own registry
functions among them, or by the config.json of a published model, which finds the one of its sizes.
"""

from __future__ import annotations

import difflib
import importlib
from functools import partial
from pathlib import Path

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer as TorchtitanTrainer

from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.errors import UserError
from wlb_titan.runtime.log import drop_misleading_warnings
from wlb_titan.runtime.metrics import MetricsProcessor
from wlb_titan.runtime.models.activation_checkpoint import SelectiveDocumentAC
from wlb_titan.runtime.models.adoption import adopt
from wlb_titan.runtime.models.published import base_of
from wlb_titan.runtime.models.variants import llama_spec
from wlb_titan.runtime.trainer import Trainer


def _llama(size: str) -> Trainer.Config:
    spec = llama_spec(size)
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
        ),
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=200),
        training=TrainingConfig(local_batch_size=4, seq_len=65536, steps=1000, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="spmd_types"),
        metrics=MetricsProcessor.Config(disable_color_printing=True),
        checkpoint=CheckpointManager.Config(interval=500, last_save_model_only=False),
        activation_checkpoint=SelectiveDocumentAC.Config(),
    )


def llama3_debug() -> Trainer.Config:
    """A Llama of 2 M parameters that trains in seconds on two CPU cores, in float32."""
    config = _llama("debug")
    config.training = TrainingConfig(
        local_batch_size=4,
        seq_len=1024,
        steps=20,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    config.optimizer = default_adamw(lr=3e-3)
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=2)
    config.metrics.log_freq = 1
    return config


BASES = {
    "llama3_debug": llama3_debug,
    **{f"llama2_{size.lower()}": partial(_llama, size) for size in PAPER_MODELS},
}
"""Ours by short name; after llama3_debug the models of the paper's Table 1, of which 7B is LLaMA-2's."""


def base_config(name: str) -> Trainer.Config:
    """The configuration that a TOML file starts from.

    Args:
        name: one of BASES, "package.module:function", or the config.json of a published model.

    Raises:
        UserError: no such base, or it is not one that wlb_titan can train.
    """
    drop_misleading_warnings()
    if name in BASES:
        return BASES[name]()
    if name.endswith(".json"):
        return base_of(Path(name), base_config)
    if ":" not in name:
        near = difflib.get_close_matches(name, BASES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"no base is called {name!r}: {hint}Known bases: {', '.join(BASES)}; or name any registry "
            'function as "package.module:function", such as '
            '"torchtitan.models.llama3.config_registry:llama3_8b", or a published model\'s config.json.'
        )
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(f"the base {name!r} cannot be imported: {error}.") from error
    try:
        base = function()
    except Exception as error:  # whatever a base needs and does not find
        raise UserError(f"the base {name!r} cannot be made: {error}") from error
    if not isinstance(base, TorchtitanTrainer.Config):
        raise UserError(f"the base {name!r} returns {type(base).__name__}, not a torchtitan Trainer.Config.")
    return base if isinstance(base, Trainer.Config) else adopt(base, name)
