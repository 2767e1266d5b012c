"""Takes over a torchtitan configuration with nothing lost, or says what would be lost.

Document attention replaces a model's inner attention, and our trainer, dataloader, metrics and validator
replace torchtitan's. Whatever a model needs that ours lack is refused here, by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor as TitanMetricsProcessor
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.components.validate import Validator as TitanValidator
from torchtitan.config import Configurable
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import BaseAttention, FlexAttention, GQAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.models.deepseek_v3 import model as deepseek_v3
from torchtitan.models.gpt_oss import model as gpt_oss
from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter
from torchtitan.trainer import Trainer as TorchtitanTrainer

from wlb_titan.errors import UserError
from wlb_titan.plugins import full_name, short_name
from wlb_titan.runtime.attention.module import DocumentAttention
from wlb_titan.runtime.compat import owner_of, recipe_of
from wlb_titan.runtime.hugging_face import GptOssAdapter
from wlb_titan.runtime.metrics import MetricsProcessor
from wlb_titan.runtime.models.checkpointing import AsNeededAC
from wlb_titan.runtime.pipeline.build import pipeline
from wlb_titan.runtime.trainer import Trainer
from wlb_titan.runtime.validator import Validator

OTHER_ATTENTION = (gpt_oss.Attention, deepseek_v3.Attention)
"""Attention in which document attention is right, besides grouped-query attention: with sinks, and
multi-head latent attention."""

ONLY_WINDOWS = (gpt_oss.__name__, "torchtitan.models.muse_glimmer.model")
"""Modules whose models make their own masks, but only of causality, documents and the layers' windows."""

REFUSED_MODULES = {
    "torchtitan.models.common.dist_gemm": "projections of the dist_gemm backend, which needs symmetric "
    "memory and is not supported yet",
    "torchtitan.components.quantization.mx": "MXFP8, which is not supported yet, but float8 is, by "
    "Float8LinearConverter",
    "torchtitan.components.quantization.nvfp4": "NVFP4, which is not supported yet, but float8 is, by "
    "Float8LinearConverter",
    "torchtitan.components.quantization.float8": "experts in float8, which are not supported yet; leave out "
    "Float8GroupedExpertsConverter, and all other layers may have Float8LinearConverter",
}
"""Parts of a model that do not run here, by the module of the class."""

LORA = "torchtitan.components.lora"

REPLACED = {
    "metrics": (TitanMetricsProcessor.Config, MetricsProcessor.Config),
    "validator": (TitanValidator.Config, Validator.Config),
    "dataloader": (BaseDataLoader.Config, HuggingFaceTextDataLoader.Config),
    "tokenizer": (HuggingFaceTokenizer.Config,),
}
"""Sections that ours replace, each with the classes that lose nothing by that."""

WHAT_TO_DO = (
    "Choose a base without that, or derive one in Python (docs/models.md lists torchtitan's bases, and why "
    "some are refused)."
)


def adopt(base: TorchtitanTrainer.Config, name: str) -> Trainer.Config:
    """A torchtitan configuration with our trainer, metrics and attention; its model is changed in place."""
    if base.model_spec is None:
        raise UserError(f"the base {name!r} has no model.")
    model = base.model_spec.model
    inner = (FlexAttention, VarlenAttention, DocumentAttention)
    if lost := [*_lost_components(base), *unsupported(model, inner)]:
        raise UserError(
            f"the base {name!r} cannot be trained as it is configured: {'; '.join(lost)}. {WHAT_TO_DO}"
        )
    for _, attention, _, _ in model.traverse(BaseAttention.Config):
        attention.inner_attention = DocumentAttention.Config(window=sliding_window(attention))
    values, spec = _fields(base), base.model_spec
    if spec.pipelining_fn is pipeline_llm:
        spec = dataclasses.replace(spec, pipelining_fn=pipeline)
    if spec.state_dict_adapter is GptOssStateDictAdapter:
        spec = dataclasses.replace(spec, state_dict_adapter=GptOssAdapter)
    values["model_spec"] = spec
    values["checkpoint"] = dataclasses.replace(base.checkpoint, export_dtype="float32")
    values["training"] = dataclasses.replace(base.training, disable_cuda_graphs=True)
    values["parallelism"] = dataclasses.replace(base.parallelism, spmd_backend="spmd_types")
    values["metrics"] = MetricsProcessor.Config(**_fields(base.metrics))
    values["validator"] = Validator.Config()
    if type(base.activation_checkpoint) is SelectiveAC.Config:
        values["activation_checkpoint"] = AsNeededAC.Config(**_fields(base.activation_checkpoint))
    return Trainer.Config(**values)


def unsupported(
    model: Configurable.Config, inner_attentions: tuple[type, ...] = (DocumentAttention,)
) -> list[str]:
    """Parts of a model that cannot be trained here, each with its first layer and how many more have it.
    `inner_attentions` are right, or may be replaced."""
    if not isinstance(model, Decoder.Config):
        return [f"{short_name(type(model))} is not a decoder of torchtitan's"]
    places: dict[str, list[str]] = {}
    for place, demand in _demands(model, inner_attentions):
        places.setdefault(demand, []).append(place)
    return [
        f"{found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''}: {demand}"
        for demand, found in places.items()
    ]


def adapters(model: Configurable.Config) -> list[str]:
    """Names of the modules that have LoRA's adapters."""
    nodes = model.traverse(Configurable.Config, recurse=True)
    return [name for name, node, _, _ in nodes if owner_of(node).__module__ == LORA]


def sliding_window(attention: BaseAttention.Config) -> int | None:
    """Most keys that a query sees, its own included; None without a sliding window."""
    inner = attention.inner_attention
    if isinstance(inner, VarlenAttention.Config) and inner.window_size[0] >= 0:
        return inner.window_size[0] + 1
    own = inner.window if isinstance(inner, DocumentAttention.Config) else None
    return getattr(attention, "sliding_window_size", own)


def _attention_demands(
    attention: BaseAttention.Config, inner_attentions: tuple[type, ...]
) -> Iterator[tuple[str, str]]:
    """Place and description of anything that a layer needs and document attention cannot do. LoRA freezes a
    model by its own configurations, so the classes that these build are compared."""
    cls = owner_of(attention)
    if not isinstance(attention, GQAttention.Config) and cls not in OTHER_ATTENTION:
        yield "", f"{full_name(cls)}, which is neither grouped-query nor multi-head latent attention"
    inner = attention.inner_attention
    if owner_of(inner) not in inner_attentions:
        yield ".inner_attention", f"{full_name(owner_of(inner))}, which document attention cannot replace"
    if isinstance(inner, VarlenAttention.Config) and inner.window_size[1] != 0:
        yield "", f"attention to later tokens (window_size = {inner.window_size})"
    window = sliding_window(attention)
    if isinstance(inner, DocumentAttention.Config) and inner.window != window:
        yield "", f"a sliding window of {window} tokens, and its inner attention one of {inner.window}"


def _demands(model: Decoder.Config, inner_attentions: tuple[type, ...]) -> Iterator[tuple[str, str]]:
    for number, layer in enumerate(model.layers):
        if getattr(layer, "attention", None) is None:
            yield f"layers.{number}", "no attention but another way of mixing tokens"
    for place, attention, _, _ in model.traverse(BaseAttention.Config):
        for part, words in _attention_demands(attention, inner_attentions):
            yield f"{place}{part}", words
    for place, node, _, _ in model.traverse(Configurable.Config, recurse=True):
        for module, words in REFUSED_MODULES.items():
            if recipe_of(node) is None and any(c.__module__.startswith(module) for c in type(node).__mro__):
                yield place, words
        if isinstance(node, LocalTokenDispatcher.Config) and owner_of(node) not in (
            LocalTokenDispatcher,
            AllToAllTokenDispatcher,
        ):
            yield place, f"{short_name(owner_of(node))}, whose buffers are sized for one length"
    if getattr(model, "mtp_layers", None):
        yield "mtp_layers", "multi-token prediction, which shifts tokens across documents and ranks"
    if getattr(model, "vision_encoder", None) is not None:
        yield "vision_encoder", "images, and a corpus has text only"
    masks = owner_of(model).get_attention_masks
    if masks is not Decoder.get_attention_masks and masks.__module__ not in ONLY_WINDOWS:
        yield "model", f"attention masks of its own ({masks.__module__})"


def _lost_components(base: TorchtitanTrainer.Config) -> Iterator[str]:
    if type(base) is not TorchtitanTrainer.Config:
        yield f"its trainer is {full_name(type(base))}, for which ours would stand in"
    for name, known in REPLACED.items():
        section = getattr(base, name)
        if type(section) not in known:
            yield f"{name} is {full_name(type(section))}, for which ours would stand in"


def _fields(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
