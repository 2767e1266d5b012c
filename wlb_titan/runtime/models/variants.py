"""Models that wlb_titan ships: Llamas in LLaMA-2 style, from a debug size to the paper's Table 1.

The paper's 7B is LLaMA-2 7B; its other models keep that architecture (multi-head attention, SwiGLU of about
8/3 of the width, rotary positions with theta 10000, untied embeddings) with layers and width scaled in
proportion. 70B keeps as many key heads as query heads, so that the paper's tensor-parallel degree of 16
divides them.
"""

from __future__ import annotations

from functools import partial

import torch.nn as nn
from torchtitan.models.common import Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import depth_scaled_std
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from wlb_titan.cost.models import PAPER_MODELS, ModelShape
from wlb_titan.runtime.attention.module import DocumentAttention
from wlb_titan.runtime.attention.rotary import PairwiseRoPE
from wlb_titan.runtime.pipeline.build import pipeline

SHAPES = {
    "debug": ModelShape(
        layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, feed_forward=384, vocabulary=4096
    ),
    **PAPER_MODELS,
}
MAX_CONTEXT = 2**20  # of the rotary table, which is cut to training.seq_len when the model is built


def llama_spec(size: str) -> ModelSpec:
    """The torchtitan model of one of SHAPES, with document attention inside."""
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
    # One object each: torchtitan writes the sharding of a module into its config.
    return RMSNorm.Config(normalized_shape=dim, param_init={"weight": nn.init.ones_})


def _linear_init(std: float) -> dict[str, object]:
    return {
        "weight": partial(nn.init.trunc_normal_, std=std, a=-3 * std, b=3 * std),
        "bias": nn.init.zeros_,
    }
