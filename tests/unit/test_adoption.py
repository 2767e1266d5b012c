"""torchtitan's bases: each is taken over with nothing lost, or refused with the reason."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import re

import pytest
import torch
from commands import ROOT
from torchtitan.components.lora import LoRAConverter
from torchtitan.config import Configurable
from torchtitan.models.common.attention import BaseAttention, FlexAttention, VarlenAttention
from torchtitan.models.llama3 import model_registry

from wlb_titan.errors import UserError
from wlb_titan.runtime.attention.module import DocumentAttention
from wlb_titan.runtime.checks import validate
from wlb_titan.runtime.compat import owner_of
from wlb_titan.runtime.hugging_face import ROUTER_BIAS, drop_router_bias, exchanged
from wlb_titan.runtime.models.adoption import unsupported
from wlb_titan.runtime.models.bases import base_config

pytestmark = pytest.mark.slow

# What is refused of torchtitan 0.3.0's registries, by the first pattern that a function's name has, and what
# the refusal says. All others that run in a plain installation are taken over; docs/models.md lists them.
REFUSED = {
    "graph_trainer_.*_sdpa.*": "ScaledDotProductAttention",
    "graph_trainer_.*": "its trainer is torchtitan.experiments.graph_trainer.trainer:GraphTrainer",
    "sft_.*": "dataloader is torchtitan.hf_datasets.text_datasets:ChatDataLoader",
    "llama3_torchft_.*": "trainer is torchtitan.experiments.torchft.trainer:FaultTolerantTrainer",
    "llama3_.*_dist_gemm": "layers.0.attention.qkv_linear and 17 more: projections of the",
    "qwen3_moe_deepep": "layers.0.moe.routed_experts.token_dispatcher and 7 more: DeepEPTokenDispatcher",
    "deepseek_v3_.*_hybridep": " more: HybridEPTokenDispatcher",
    "deepseek_v3_.*_minimal_async_ep": " more: MinimalAsyncEPTokenDispatcher",
    ".*_mxfp8": ": MXFP8, which is not supported yet",
    ".*_nvfp4": ": NVFP4, which is not supported yet",
    "deepseek_v3_.*_float8": "experts in float8, which are not supported yet; leave out Float8GroupedExperts",
    "deepseek_v3_debugmodel_mtp": "mtp_layers: multi-token prediction",
}
PACKAGES = (
    *("models.llama3", "models.qwen3", "models.deepseek_v3", "models.gpt_oss", "models.muse_glimmer"),
    *(f"experiments.graph_trainer.{name}" for name in ("deepseek_v3", "llama3", "muse_glimmer", "qwen3")),
    "experiments.torchft.llama3",
)
"""With pre-training configurations of torchtitan's own models."""


def refusal_of(name):
    return next((words for pattern, words in REFUSED.items() if re.fullmatch(pattern, name)), None)


@pytest.fixture(scope="module")
def bases():
    """Each registry function that runs here: its name for `base`, and itself."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(f"torchtitan.{package}.config_registry")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ != module.__name__ or inspect.signature(function).parameters:
                continue
            try:
                function()
            except (ImportError, ValueError):
                continue  # a package is missing, or a GPU
            found[package, name] = f"{module.__name__}:{name}", function
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_lost_or_the_base_is_refused(bases, package):
    of_package = {name: found for (of, name), found in bases.items() if of == package}
    assert of_package, "a registry that is not there"
    for name, (full_name, function) in of_package.items():
        if refusal := refusal_of(name):
            with pytest.raises(UserError, match=f"{full_name}.*{re.escape(refusal)}"):
                base_config(full_name)
        else:
            assert_nothing_lost(function(), base_config(full_name))


def test_the_documentation_names_every_base_that_trains(bases):
    page = ROOT / "docs" / "models.md"
    before, after = page.read_text().split("These are refused:")
    trains = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*$", before, re.MULTILINE))))
    refused = set(re.findall(r"`(\w+)`", after[: after.index("##")]))
    adopted = {name for _, name in bases if not refusal_of(name)}
    assert trains - adopted == {"qwen3_debugmodel_flex_flash"}  # needs a GPU
    assert adopted <= trains
    assert not refused & adopted


CHANGED = {"disable_cuda_graphs": True, "spmd_backend": "spmd_types", "export_dtype": "float32"}


def assert_nothing_lost(base, adopted):
    """Field by field: only what our runtime stands for differs, and of that all settings are as they were."""
    before = dict(settings_of(base.model_spec.model))
    after = dict(settings_of(adopted.model_spec.model))
    causal = (FlexAttention.Config, VarlenAttention.Config)
    inner = tuple(n for n, value in before.items() if isinstance(value, type) and issubclass(value, causal))
    assert len(inner) == len(adopted.model_spec.model.layers)
    for name in inner:
        assert after[name] is DocumentAttention.Config
        assert after[f"{name}.window"] == window_of(before, name)
    before, after = ({n: v for n, v in one.items() if not n.startswith(inner)} for one in (before, after))
    assert before == after
    # [wlb.validation] takes the place of the base's own.
    for section in {field.name for field in dataclasses.fields(base)} - {"model_spec", "validator"}:
        after = dict(settings_of(getattr(adopted, section), section))
        for name, value in settings_of(getattr(base, section), section):
            new = after[name]
            if isinstance(value, type):
                assert issubclass(new, value), name
            else:
                assert new == CHANGED.get(name.rpartition(".")[2], value), name


def window_of(settings, inner):
    """Keys that a query of torchtitan's layer sees: VarlenAttention is told, and the masks of FlexAttention
    are made by the layer's own setting."""
    before, _ = settings.get(f"{inner}.window_size", (-1, 0))
    layer = inner.removesuffix(".inner_attention")
    own = settings.get(f"{layer}.sliding_window_size", settings.get(f"{layer}.window_size"))
    assert before < 0 or own is None or own == before + 1
    return before + 1 if before >= 0 else own


def settings_of(value, name="model"):
    """Every value below a configuration, with its dotted name; initialisers by what they do."""
    inner = {}
    if dataclasses.is_dataclass(value):
        yield name, type(value)
        inner = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, dict | list):
        yield name, len(value)
        inner = value if isinstance(value, dict) else dict(enumerate(value))
    elif isinstance(value, functools.partial):
        yield name, (value.func, value.args, tuple(value.keywords.items()))
    elif inspect.isfunction(value) and value.__closure__:
        yield name, value.__qualname__
        inner = inspect.getclosurevars(value).nonlocals
    else:
        yield name, value
    for key, item in inner.items():
        yield from settings_of(item, f"{name}.{key}")


@pytest.fixture
def changed_base(monkeypatch):
    """The name of a base that is torchtitan's debug model with a change."""
    registry = importlib.import_module("torchtitan.models.llama3.config_registry")
    whole = registry.llama3_debugmodel

    def named(change):
        def base():
            config = whole()
            change(config)
            return config

        monkeypatch.setattr(registry, "llama3_debugmodel", base)
        return f"{registry.__name__}:llama3_debugmodel"

    return named


def attentions(config):
    return [attention for _, attention, _, _ in config.model_spec.model.traverse(BaseAttention.Config)]


def derived(config):
    """The same settings, of a class of this file that does the same."""

    class Derived(owner_of(config)):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(type(config)):
            pass

    return Derived.Config(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def look_ahead(config):
    for attention in attentions(config):
        attention.inner_attention = VarlenAttention.Config(window_size=(-1, -1))


def replace_an_inner_attention(config):
    attentions(config)[0].inner_attention = Configurable.Config()


def quantise(config):
    feed_forward = config.model_spec.model.layers[1].feed_forward
    feed_forward.w2 = derived(feed_forward.w2)
    type(feed_forward.w2).__module__ = "torchtitan.components.quantization.mx"


def take_attention_out(config):
    config.model_spec.model.layers[2].attention = None


def fail(config):
    raise ImportError("torchao is not installed")


def make_own_masks(config):
    def get_attention_masks(self, positions):
        return None

    config.model_spec.model = derived(config.model_spec.model)
    owner_of(config.model_spec.model).get_attention_masks = get_attention_masks


@pytest.mark.parametrize(
    "change, words",
    [
        (look_ahead, "layers.0.attention and 5 more: attention to later tokens"),
        (replace_an_inner_attention, "layers.0.attention.inner_attention: torchtitan.config.configurable:"),
        (quantise, "layers.1.feed_forward.w2: MXFP8, which is not supported yet"),
        (take_attention_out, "layers.2: no attention"),
        (fail, "needs torchao: pip install 'wlb-titan[float8]'"),
        (make_own_masks, "model: attention masks of its own (test_adoption)"),
    ],
)
def test_what_document_attention_does_not_do_is_refused(changed_base, change, words):
    with pytest.raises(UserError, match=re.escape(words)):
        base_config(changed_base(change))


def test_lora_trains_its_adapters_and_no_more(changed_base):
    """And the format that would leave them out is refused."""

    def adapt(config):
        config.model_spec = model_registry("debugmodel", converters=[LoRAConverter.Config(rank=4)])

    config = base_config(changed_base(adapt))
    with torch.device("meta"):
        model = config.model_spec.model.build()
    trained = {name.rpartition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    layer = ("attention.qkv_linear.wqkv", "attention.wo", "feed_forward.w1", "feed_forward.w2")
    assert {f"layers.5.{name}" for name in layer} < trained and "" not in trained
    config.checkpoint.enable = config.checkpoint.last_save_in_hf = True
    with pytest.raises(UserError, match="LoRA's adapters have no place"):
        validate(config, 1)


def test_a_layer_s_window_that_document_attention_lacks_is_refused():
    model = base_config("torchtitan.models.gpt_oss.config_registry:gpt_oss_debugmodel").model_spec.model
    assert unsupported(model) == []
    model.layers[0].attention.inner_attention = DocumentAttention.Config()
    words = "layers.0.attention: a sliding window of 128 tokens, and its inner attention one of None"
    assert unsupported(model) == [words]


@pytest.mark.parametrize("package", [name for name in PACKAGES if name.startswith("models.")])
def test_every_tensor_goes_to_hugging_face_s_format_and_back(bases, package):
    """But the bias of routers where that has none: such a run trains without."""
    for (of, name), (full_name, _) in bases.items():
        if of != package or refusal_of(name):
            continue
        spec = base_config(full_name).model_spec
        spec.model.layers = [spec.model.layers[0], spec.model.layers[-1]]
        lost = exchanged(spec)[1]
        assert all(tensor.endswith(ROUTER_BIAS) for tensor in lost), f"{name}: {lost}"
        assert drop_router_bias(spec) is bool(lost)
        shapes, lost = exchanged(spec)
        assert not lost and len(shapes) > 20, f"{name}: {lost}"


def test_an_adapter_that_loses_a_tensor_is_refused(changed_base):
    def forget(config):
        class Forgetful(config.model_spec.state_dict_adapter):
            def to_hf(self, state_dict):
                return super().to_hf({n: t for n, t in state_dict.items() if "layers.3.ffn_norm" not in n})

        config.model_spec.state_dict_adapter = Forgetful

    config = base_config(changed_base(forget))
    validate(config, 1)
    config.checkpoint.enable = config.checkpoint.last_save_in_hf = True
    with pytest.raises(UserError, match=r"last_save_in_hf: .* 1 tensors .* layers.3.ffn_norm.weight; leave"):
        validate(config, 1)


def widen_vocabulary(model):
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = 4097


def widen_feed_forward(model):
    layer = model.layers[2].feed_forward
    layer.w1.out_features = layer.w3.out_features = layer.w2.in_features = 385


def widen_experts(model):
    model.layers[1].moe.routed_experts.inner_experts.hidden_dim = 65


MOE = "torchtitan.models.qwen3.config_registry:qwen3_moe_debug"
GPT_OSS = "torchtitan.models.gpt_oss.config_registry:gpt_oss_debugmodel"


@pytest.mark.parametrize(
    ("base", "change", "degrees", "words"),
    [
        ("llama3_debug", widen_vocabulary, {"tensor": 2}, "tensor_parallel_degree: 2 ranks .* the 4,097"),
        ("llama3_debug", widen_feed_forward, {"tensor": 2}, "the 385 entries of layers.2.feed_forward.w"),
        (MOE, widen_experts, {"tensor": 2}, "the 65 entries of layers.1.moe.routed_experts.inner_experts"),
        (MOE, widen_experts, {"tensor": 2, "expert": 2}, None),  # whole experts
        (MOE, None, {"context": 3, "expert": 3}, "expert_parallel_degree: 3 ranks .* the 64 entries"),
        (GPT_OSS, None, {"tensor": 2}, "expert_parallel_degree: tensor-parallel ranks .* set it to 2"),
        (GPT_OSS, None, {"tensor": 2, "expert": 2}, None),
    ],
)
def test_what_ranks_cannot_share_equally_is_refused(base, change, degrees, words):
    config = base_config(base)
    if change is not None:
        change(config.model_spec.model)
    for name, degree in degrees.items():
        setattr(config.parallelism, f"{name}_parallel_degree", degree)
    config.training.seq_len, config.parallelism.data_parallel_shard_degree = 768, 1
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        validate(config, None)


def test_a_seed_checkpoint_is_made_by_one_process():
    config = base_config("llama3_debug")
    config.checkpoint.enable = config.checkpoint.create_seed_checkpoint = True
    validate(config, 1)
    with pytest.raises(UserError, match=r"create_seed_checkpoint: one process makes .* 2 processes"):
        validate(config, 2)
    config.checkpoint.enable = False
    with pytest.raises(UserError, match="create_seed_checkpoint: nothing is loaded or saved"):
        validate(config, 1)
