"""Base configurations, which a TOML file names as its `base`.

A base is a function without arguments that returns a torchtitan Trainer.Config. Ours, below, have short
names; others are named "package.module:function", such as torchtitan's registry functions, or by the
config.json of a published model, which finds the base of its sizes.

Our models are Llamas in LLaMA-2 style, from a debug size to the paper's Table 1; its 7B is LLaMA-2 7B. The
others keep that architecture (multi-head attention, SwiGLU of about 8/3 of the width, rotary positions with
theta 10000, untied embeddings) with layers and width scaled in proportion. 70B has as many key heads as query
heads, so that the paper's tensor-parallel degree of 16 divides them.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import depth_scaled_std
from torchtitan.models.llama3 import Llama3Model, model_registry, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer as TorchtitanTrainer

from wlb_titan.cost.models import PAPER_MODELS, ModelShape
from wlb_titan.errors import UserError
from wlb_titan.plugins import load
from wlb_titan.runtime.attention.module import DocumentAttention
from wlb_titan.runtime.metrics import MetricsProcessor, drop_misleading_warnings
from wlb_titan.runtime.models import float8
from wlb_titan.runtime.models.adoption import adopt
from wlb_titan.runtime.models.checkpointing import AsNeededAC
from wlb_titan.runtime.models.description import differences, read_description
from wlb_titan.runtime.pipeline.build import pipeline
from wlb_titan.runtime.trainer import Trainer

SHAPES = {
    "debug": ModelShape(
        layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, feed_forward=384, vocabulary=4096
    ),
    **PAPER_MODELS,
}
MAX_CONTEXT = 2**20  # of the rotary table, which is cut to training.seq_len when the model is built

PUBLISHED = ("torchtitan.models.llama3.config_registry", "torchtitan.models.qwen3.config_registry")
"""Modules with the bases of published models."""


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
        activation_checkpoint=AsNeededAC.Config(),
    )


def llama3_debug() -> Trainer.Config:
    """A Llama of 2 M parameters that trains in seconds on two CPU cores, in float32."""
    config = _llama("debug")
    config.training = replace(config.training, seq_len=1024, steps=20, mixed_precision_param="float32")
    config.optimizer = default_adamw(lr=3e-3)
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=2)
    config.metrics.log_freq = 1
    return config


def qwen3_8b() -> Trainer.Config:
    """Qwen3 8B, for which torchtitan has no base, with the settings of 14B; both have 151,936 tokens."""
    from torchtitan.models.qwen3 import model_registry
    from torchtitan.models.qwen3.config_registry import qwen3_14b

    config = qwen3_14b()
    config.model_spec = model_registry("8B")
    return adopt(config, "qwen3_8b")


def llama3_8b_float8() -> Trainer.Config:
    """Llama 3.1 8B, whose layers multiply in float8, and its head in the activations' type."""
    from torchtitan.models.llama3.config_registry import llama3_8b

    config, converter = llama3_8b(), Float8LinearConverter.Config(filter_fqns=["lm_head"])
    config.model_spec = model_registry("8B", converters=[converter])
    return adopt(config, "llama3_8b_float8")


BASES = {
    "llama3_debug": llama3_debug,
    **{f"llama2_{size.lower()}": partial(_llama, size) for size in PAPER_MODELS},
    "qwen3_8b": qwen3_8b,
    "llama3_8b_float8": llama3_8b_float8,
}
"""Ours, by short name; those of llama2 are the models of the paper's Table 1."""


def base_config(name: str) -> Trainer.Config:
    """The base of one of BASES, of "package.module:function", or of a published model's config.json."""
    drop_misleading_warnings()
    if name.endswith(".json"):
        return _published(name)
    if ":" not in name and name not in BASES:
        raise UserError(
            f"no base is called {name!r}. Known bases: {', '.join(BASES)}; or name any registry function as "
            '"package.module:function", such as "torchtitan.models.llama3.config_registry:llama3_8b", or a '
            "published model's config.json."
        )
    function = BASES.get(name) or load(name)
    try:
        base = function()
    except Exception as error:  # a base may fail in any way
        if "torchao is not installed" in str(error):
            raise UserError(f"the base {name!r} needs torchao: pip install 'wlb-titan[float8]'.") from error
        raise UserError(f"the base {name!r} cannot be made: {error}") from error
    if not isinstance(base, TorchtitanTrainer.Config):
        raise UserError(f"the base {name!r} returns {type(base).__name__}, not a torchtitan Trainer.Config.")
    return base if isinstance(base, Trainer.Config) else adopt(base, name)


def _published(path: str) -> Trainer.Config:
    try:
        theirs = read_description(Path(path))
    except (OSError, ValueError) as error:
        raise UserError(f"the base {path!r} cannot be read: {error}.") from error
    names, differing = [*BASES], dict[str, list[str]]()
    for module in PUBLISHED:
        functions = inspect.getmembers(importlib.import_module(module), inspect.isfunction)
        names += [f"{module}:{name}" for name, function in functions if function.__module__ == module]
    for name in names:
        try:
            config = base_config(name)
        except UserError:
            continue
        if float8.recipes(config.model_spec.model):
            continue  # which a description does not ask for
        differing[name] = differences(config.model_spec.model, theirs)
        if not differing[name]:
            return config
    nearest = min(differing, key=lambda name: len(differing[name]))
    raise UserError(
        f"no base matches the model that {path!r} describes; name your own registry function as "
        f'"package.module:function". The nearest base is {nearest!r}: {"; ".join(differing[nearest][:5])}.'
    )


def llama_spec(size: str) -> ModelSpec:
    shape = SHAPES[size]
    dim = shape.hidden
    rope = PairwiseRoPE.Config(dim=shape.head_dim, max_seq_len=MAX_CONTEXT, theta=10000.0)
    model = Llama3Model.Config(
        dim=dim,
        vocab_size=shape.vocabulary,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocabulary,
            embedding_dim=dim,
            param_init={"weight": partial(nn.init.normal_, std=1.0)},
        ),
        norm=_norm(dim),
        lm_head=Linear.Config(
            in_features=dim, out_features=shape.vocabulary, param_init=_linear_init(dim**-0.5)
        ),
        layers=[
            Llama3TransformerBlock.Config(
                attention_norm=_norm(dim),
                ffn_norm=_norm(dim),
                attention=make_gqa_config(
                    dim=dim,
                    n_heads=shape.heads,
                    n_kv_heads=shape.kv_heads,
                    wqkv_param_init=_linear_init(0.02),
                    wo_param_init=_linear_init(depth_scaled_std(0.02, layer)),
                    inner_attention=DocumentAttention.Config(),
                    fuse_qkv=True,
                    rope=rope,
                ),
                feed_forward=make_ffn_config(
                    dim=dim,
                    hidden_dim=shape.feed_forward,
                    w1_param_init=_linear_init(0.02),
                    w2w3_param_init=_linear_init(depth_scaled_std(0.02, layer)),
                ),
            )
            for layer in range(shape.layers)
        ],
    )
    return ModelSpec(
        name="llama",
        flavor=size,
        model=model,
        parallelize_fn=parallelize_llama,
        pipelining_fn=pipeline,
        post_optimizer_build_fn=None,
        state_dict_adapter=Llama3StateDictAdapter,
    )


def _norm(dim: int) -> RMSNorm.Config:
    # A new object each time: torchtitan writes the sharding of a module into its config.
    return RMSNorm.Config(normalized_shape=dim, param_init={"weight": nn.init.ones_})


def _linear_init(std: float) -> dict[str, object]:
    return {
        "weight": partial(nn.init.trunc_normal_, std=std, a=-3 * std, b=3 * std),
        "bias": nn.init.zeros_,
    }


class PairwiseRoPE(ComplexRoPE):
    """ComplexRoPE, whose table compiled code reads as real numbers.

    torchtitan's turns neighbouring pairs of a head's elements as complex numbers, which Inductor does not
    fuse: the conversions and the product are kernels of their own after the split of QKV, 6 % of the device
    time of a 550M Llama's step at 65,536 tokens on an H100. Here compiled code turns the pairs in real
    arithmetic, which fuses with split and casts, forward and backward. Uncompiled code keeps the complex
    product: three kernels, where real arithmetic would be six.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        pass

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Turns (1, tokens, heads, head dim). positions: int64 (1, tokens), in documents; None: from 0."""
        if not torch.compiler.is_compiling():
            return super().forward(query, key, positions)
        table = torch.view_as_real(self.cache)
        rows = table[: query.shape[1]] if positions is None else table[positions.squeeze(0)]
        return _turned(query, rows), _turned(key, rows)


def _turned(x: Tensor, rows: Tensor) -> Tensor:
    """(a, b) of each pair of x to (a cos - b sin, b cos + a sin), in float32 as a complex product.

    x: (1, tokens, heads, head dim); rows: float32 (tokens, pairs, 2), cosine and sine.
    """
    cos, sin = rows[:, None, :, :1], rows[:, None, :, 1:]
    sign = torch.arange(-1, 2, 2, device=x.device)
    pairs = x.float().unflatten(-1, (-1, 2))
    return (pairs * cos + pairs.flip(-1) * (sin * sign)).flatten(-2).type_as(x)
