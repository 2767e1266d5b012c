"""What is refused of a model, its optimizer and its loss: they are built without memory, or tried on a few
numbers, as torchtitan would only find out in the ranks."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import warnings

import spmd_types
import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from wlb_titan.errors import PlanError, UserError
from wlb_titan.pipeline.schedule import SCHEDULES, canonical_name, check_micro_batches
from wlb_titan.plugins import short_name
from wlb_titan.runtime.compat import modules_of_stages, optimizer_factory, owner_of
from wlb_titan.runtime.config import TrainerConfig
from wlb_titan.runtime.configured import model_shape
from wlb_titan.runtime.hugging_face import check_exchange, on_meta
from wlb_titan.runtime.models.adoption import WHAT_TO_DO, adapters, unsupported
from wlb_titan.runtime.pipeline.build import pipeline, stage_names

Weights = dict[str, nn.Parameter]


def trained_spec(config: TrainerConfig) -> ModelSpec:
    """A copy of the model's specification, with the run's settings and the user's overrides."""
    config = copy.deepcopy(config)
    try:
        config.model_spec.model.update_from_config(config=config)
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise UserError(f"the model refuses this: {error}") from error
    if config.override.imports:
        try:
            apply_overrides(config.override, config)
        except Exception as error:  # importing and calling the user's own code
            raise UserError(f"override.imports: {error}") from error
    return config.model_spec


def check_model(config: TrainerConfig, dims: ParallelDims) -> Weights:
    """The model's parameters by name, on the meta device; refuses what cannot be trained, shared or saved."""
    spec = trained_spec(config)
    if missing := unsupported(spec.model):
        cause = "override.imports" if config.override.imports else "base"
        raise UserError(f"{cause}: the model has {'; '.join(missing)}. {WHAT_TO_DO}")
    if config.checkpoint.last_save_in_hf and adapters(spec.model):
        raise UserError(
            "checkpoint.last_save_in_hf: LoRA's adapters have no place in that format, and torchtitan would "
            "save the weights without them; leave it out, and the last checkpoint has both."
        )
    model = on_meta(spec)
    weights = dict(model.named_parameters())
    _check_shares(config, spec, weights, dims)
    # What is loaded in that format is checked with the folder of weights.
    if config.checkpoint.last_save_in_hf and not config.checkpoint.initial_load_in_hf:
        check_exchange("last_save_in_hf", spec, model)
    return weights


def _check_shares(config: TrainerConfig, spec: ModelSpec, weights: Weights, dims: ParallelDims) -> None:
    """Refuses weights that ranks of tensor or expert parallelism, or FSDP's, cannot share equally, or whose
    results would add up wrongly."""
    degrees = {"tp": ("tensor", dims.tp), "ep": ("expert", dims.ep)}
    sharers = dims.dp_shard * dims.cp * (dims.tp if dims.ep > 1 else 1) // dims.ep  # FSDP's, of an expert
    for place, node, _, _ in spec.model.traverse(Module.Config, recurse=True):
        # Their experts give bfloat16 whatever they take, and look for their tensor-parallel degree in
        # DTensors, which ours are not: each of those ranks adds a whole bias.
        gpt_oss = owner_of(node) is GptOssGroupedExperts
        if gpt_oss and dims.ep == 1 < dims.tp:
            raise UserError(
                f"parallelism.expert_parallel_degree: tensor-parallel ranks would add the second bias of "
                f"{place} {dims.tp} times, as torchtitan does not divide it; set it to {dims.tp}, so that "
                "they share whole experts."
            )
        if gpt_oss and config.training.mixed_precision_param != "bfloat16":
            raise UserError(
                f"training.mixed_precision_param: {place} gives bfloat16 whatever it takes, which cannot be "
                'added to other numbers; set it to "bfloat16".'
            )
        across = isinstance(node, GroupedExperts.Config) and sharers * dims.ep > node.num_experts
        for name, layout in node.sharding_config.state_shardings.items() if node.sharding_config else ():
            if (weight := weights.get(f"{place}.{name}")) is None:
                continue
            sizes = list(weight.shape)
            for axis, kind in layout.per_axis_spmd_types().items():
                what, degree = degrees.get(axis.value, ("", 1))
                if not isinstance(kind, spmd_types.Shard):
                    continue
                if sizes[kind.dim] % degree:
                    raise UserError(
                        f"parallelism.{what}_parallel_degree: {degree} ranks cannot share the "
                        f"{sizes[kind.dim]:,} entries of {place}.{name} equally; set a degree that divides "
                        "them."
                    )
                sizes[kind.dim] //= degree
            if across and sizes[1] % sharers:  # torchtitan divides each expert where ranks outnumber them
                raise UserError(
                    f"parallelism.data_parallel_shard_degree: FSDP would divide each of the "
                    f"{node.num_experts} experts over {sharers} ranks, and these cannot share the "
                    f"{sizes[1]:,} entries of {place}.{name} equally; lower this degree, and raise "
                    f"data_parallel_replicate_degree, until ranks are no more than experts or divide them."
                )


def check_pipeline(config: TrainerConfig, dims: ParallelDims) -> None:
    if not dims.pp_enabled:
        return
    if config.model_spec.pipelining_fn is not pipeline:
        raise UserError(
            f"parallelism.pipeline_parallel_degree: {config.model_spec.name} cannot be cut into stages, or "
            "only by a function for micro-batches of one length; set it to 1."
        )
    key, own = "parallelism.pipeline_parallel_schedule", config.parallelism.module_fqns_per_model_part
    try:
        schedule = canonical_name(config.parallelism.pipeline_parallel_schedule)
        stages = stage_names(config.parallelism, config.model_spec.model)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from error
    # torchtitan leaves out what is in no stage, and computes the stages in the order that they are named.
    modules = modules_of_stages(1, len(config.model_spec.model.layers), 1, 1)[0]
    single = SCHEDULES[schedule].chunks == 1
    fits = len(stages) % dims.pp == 0 and single == (len(stages) == dims.pp)
    if own is not None and not (fits and [*itertools.chain(*own)] == modules):
        raise UserError(
            f"parallelism.module_fqns_per_model_part: {schedule} runs "
            f"{'one stage' if single else 'two stages or more'} on each of {dims.pp} ranks, and each module "
            "must be in exactly one stage, in the model's order, as each stage goes on from the one before "
            f"it: {', '.join(modules)}."
        )
    if SCHEDULES[schedule].splits and config.compile.enable and "model" in config.compile.components:
        raise UserError(
            f"{key}: {schedule} runs the backward passes of inputs and of weights one after the other, which "
            "torch cannot do with a compiled model; set compile.enable to false, or choose another schedule"
        )
    # Slices have their own schedule, but validation runs whole documents in the job's.
    if not config.wlb.packing.owner.slices or config.wlb.validation.enabled:
        try:
            check_micro_batches(schedule, dims.pp, len(stages), config.training.local_batch_size)
        except PlanError as error:
            raise UserError(f"{key}: {error}") from error


def check_experts(config: TrainerConfig, dims: ParallelDims) -> None:
    key = "parallelism.expert_parallel_degree"
    if dims.ep > 1 and not model_shape(config.model_spec.model).experts:
        raise UserError(f"{key}: the model has no experts; set it to 1.")
    packing, whole = config.wlb.packing, dims.cp * dims.tp
    if packing.owner.slices and whole % dims.ep:
        raise UserError(
            f"{key}: {dims.ep} ranks share experts, among them several data-parallel ranks. These meet in "
            f"every pass, but under {packing.name} each runs the backward passes of its slices in its own "
            f"order. Set it to a divisor of the {whole} ranks of context ({dims.cp}) x tensor parallelism "
            f"({dims.tp}), or choose another policy."
        )


def check_optimizer(config: TrainerConfig) -> None:
    """Tries optimizers on one parameter, with their keywords as arguments, which torch checks. torchtitan
    passes them as a parameter group, whose unknown names torch ignores: `lrr = 0.1` would train at the
    default rate."""
    if not isinstance(config.optimizer, OptimizersContainer.Config):
        return
    for number, group in enumerate(config.optimizer.param_groups):
        key, keywords = f"optimizer.param_groups.{number}", group.optimizer_kwargs
        try:
            factory = optimizer_factory(owner_of(config.optimizer), group.optimizer_name)
        except NotImplementedError as error:
            raise UserError(f"{key}.optimizer_name: torchtitan says: {error}") from error
        arguments = inspect.signature(factory).parameters
        if any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values()):
            continue  # it checks its arguments itself
        try:
            factory([nn.Parameter(torch.zeros(1, 1))], **keywords)
        except Exception as error:  # an argument of a wrong type may raise anything
            raise UserError(
                f"{key}.optimizer_kwargs: {group.optimizer_name} refuses this: {error}. It takes "
                f"{', '.join(list(arguments)[1:])}."
            ) from error


def check_groups(config: TrainerConfig, weights: Weights, dims: ParallelDims) -> None:
    """Tries the groups' patterns on the names of each stage's parameters: the first that matches has it."""
    patterns = [group.pattern for group in getattr(config.optimizer, "param_groups", [])]
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    stages = stage_names(config.parallelism, config.model_spec.model) if dims.pp_enabled else [[""]]
    for number, modules in enumerate(stages):
        where = f"stage {number}" if dims.pp_enabled else "the model"
        inside = tuple(f"{module}." if module else "" for module in modules)
        left = [name for name in trained if name.startswith(inside)]
        if not left:
            raise UserError(
                "parallelism.pipeline_parallel_degree: LoRA trains nothing in the stage of "
                f"{', '.join(modules)}, and an optimizer needs weights; choose stages of more layers."
            )
        for place, pattern in enumerate(patterns):
            key = f"optimizer.param_groups.{place}.pattern"
            try:
                unmatched = [name for name in left if not re.search(pattern, name)]
            except re.error as error:
                raise UserError(f"{key}: it is not a valid regular expression: {error}.") from error
            if unmatched == left:
                raise UserError(
                    f"{key}: it matches no parameter of {where} that earlier groups leave; remove the group, "
                    "or widen its pattern."
                )
            left = unmatched
        if left and patterns:
            raise UserError(
                f"optimizer.param_groups: no pattern matches {left[0]}, one of {len(left)} such parameters "
                f'of {where}; add a last group with the pattern ".*".'
            )


def check_parts(config: TrainerConfig) -> None:
    """Tries garbage collection, profiler, compiler and loss. A loss of the user's own may need a GPU."""
    if config.training.gc_freq < 1:
        raise UserError("training.gc_freq: it is a number of steps, at least 1.")
    profiler = config.profiler
    steps = profiler.profiler_warmup + profiler.profiler_active
    if profiler.enable_profiling and profiler.profile_freq < steps:
        raise UserError(
            "profiler.profile_freq: it must be at least profiler_warmup + profiler_active, which are "
            f"{steps}."
        )
    backends = torch.compiler.list_backends(exclude_tags=()) if config.compile.enable else []
    if config.compile.enable and config.compile.backend not in backends:
        raise UserError(f"compile.backend: torch has no such backend; it has {', '.join(backends)}.")
    loss = getattr(config.loss, "loss_fn", config.loss)
    if not type(loss).__module__.startswith("torchtitan."):
        return
    logits = torch.zeros(1, 2, config.model_spec.model.vocab_size, requires_grad=True)
    labels = torch.ones(1, 2, dtype=torch.long)
    try:
        with warnings.catch_warnings(action="ignore"):
            loss.build(compile_config=None)(logits, labels, torch.tensor(2.0))
    except RuntimeError as error:
        raise UserError(
            f"loss.class: {short_name(type(loss))} takes no labels that are token ids: {error}"
        ) from error
