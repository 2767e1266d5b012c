"""What is refused before anything starts: of a whole configuration, and of the files that it names.

torchtitan's own checks run on copies, and their messages are passed on. Added are the conditions on which
torchtitan would only fail in the middle of a run.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from pathlib import Path

import spmd_types
import torch
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.protocols.module import Module

from wlb_titan.config.documents import (
    mixture_sources,
    open_corpus,
    steps_of_epochs,
    training_documents,
    validated_documents,
)
from wlb_titan.config.values import shown
from wlb_titan.corpus import Corpus, CorpusError
from wlb_titan.errors import PlanError, UserError
from wlb_titan.pipeline.schedule import check_micro_batches
from wlb_titan.plugins import full_name, short_name
from wlb_titan.runtime.agreement import check_rates
from wlb_titan.runtime.attention.implementation import check_implementation
from wlb_titan.runtime.checkpoints import beginning
from wlb_titan.runtime.compat import optimizer_factory, owner_of
from wlb_titan.runtime.config import TrainerConfig
from wlb_titan.runtime.dump_folder import check_place
from wlb_titan.runtime.ends import seconds_of
from wlb_titan.runtime.hugging_face import ROUTER_BIAS, check_weights, exchanged
from wlb_titan.runtime.job import configured_degrees, degrees_product, has_experts, job_of, parallel_dims
from wlb_titan.runtime.loss import weighted
from wlb_titan.runtime.meshes import Dims
from wlb_titan.runtime.models.adoption import WHAT_TO_DO, adapters, unsupported
from wlb_titan.runtime.pipeline.build import pipeline
from wlb_titan.runtime.pipeline.schedules import canonical_name, check_schedule, check_stages, stage_names
from wlb_titan.simulator.choice import choose

ONLY = {
    "parallelism.spmd_backend": ("spmd_types", "our attention takes local tensors"),
    "parallelism.pipeline_parallel_microbatch_size": (1, "a micro-batch is one packed sequence"),
    "training.disable_cuda_graphs": (True, "a CUDA graph replays one length, and those here differ"),
    "debug.spmd_typechecking": (False, "torchtitan cannot follow tensors through document attention"),
    "comm.mode": ("default", "each rank here is a process with micro-batches of its own"),
    "validator.enable": (
        False,
        "torchtitan's validation reads a dataset of the Hugging Face hub; hold out some of your documents, "
        "wlb.validation.hold_out = 0.01, or name others with wlb.validation.path",
    ),
}
"""torchtitan's settings that have one right value here, with the reason."""

WHOLE_BIAS = ("torchtitan.models.gpt_oss.moe:GptOssGroupedExperts",)
"""Experts that look for their tensor-parallel degree in DTensors, which ours are not: each of those ranks
adds a whole bias."""


def validate(config: TrainerConfig, world_size: int | None) -> None:
    """Refuses what cannot run on so many processes (None: as many as it needs); a UserError names the key."""
    _check_degrees(config, world_size)
    dims = parallel_dims(config, world_size)
    _check_experts(config, dims, world_size)
    _check_batch(config, dims)
    _check_settings(config)
    _check_checkpoint(config, dims)
    _check_model(config, dims)
    check_implementation(config)
    _check_pipeline(config, dims)
    _check_optimizer(config)
    _check_groups(config, dims)
    _check_parts(config)
    _check_job(config, dims)


def _check_degrees(config: TrainerConfig, world_size: int | None) -> None:
    shard, product = config.parallelism.data_parallel_shard_degree, degrees_product(config)
    if shard == 0:
        raise UserError(
            "parallelism.data_parallel_shard_degree: a degree is at least 1, or -1 for all processes that "
            "the other degrees leave."
        )
    if world_size is None or (world_size % product == 0 if shard == -1 else world_size == product):
        return
    degrees = configured_degrees(config).items()
    needed = " x ".join(f"{key.split('.', 1)[1]} {degree}" for key, degree in degrees)
    raise UserError(
        f"parallelism: {world_size} processes do not fit the degrees: {needed} need {product}"
        + (" or a multiple of it." if shard == -1 else ".")
    )


def _check_experts(config: TrainerConfig, dims: ParallelDims, world_size: int | None) -> None:
    sharing = dims.dp_shard * dims.cp * dims.tp
    open_degree = config.parallelism.data_parallel_shard_degree == -1 and world_size is None
    if sharing % dims.ep and not open_degree:
        raise UserError(
            f"parallelism.expert_parallel_degree: {dims.ep} ranks share experts, which must divide the "
            f"{sharing} ranks of data-parallel shards ({dims.dp_shard}) x context ({dims.cp}) x tensor "
            f"parallelism ({dims.tp})."
        )
    packing, whole = config.wlb.packing, dims.cp * dims.tp
    slices = packing.owner.slices and not packing.shadow
    if slices and whole % dims.ep and has_experts(config.model_spec.model):
        raise UserError(
            f"parallelism.expert_parallel_degree: {dims.ep} ranks share experts, among them several "
            f"data-parallel ranks. These meet in every pass, and under {packing.name} each runs the backward "
            f"passes of its slices in an order of its own. Set it to a divisor of the {whole} ranks of "
            f"context ({dims.cp}) x tensor parallelism ({dims.tp}), or take another policy."
        )


def _check_batch(config: TrainerConfig, dims: Dims) -> None:
    local, total = config.training.local_batch_size, config.training.global_batch_size
    if total > 0 and total % (local * dims.data) != 0:
        raise UserError(
            f"training.global_batch_size: {total} micro-batches cannot be shared equally: it must be a "
            f"multiple of local_batch_size ({local}) x the data-parallel degree ({dims.data})."
        )


def _check_settings(config: TrainerConfig) -> None:
    for key, (value, reason) in ONLY.items():
        section, name = key.split(".")
        if getattr(getattr(config, section), name) != value:
            raise UserError(f"{key}: {reason}; set it to {shown(value)}.")
    if strangers := set(config.compile.components) - {"model", "loss"}:
        raise UserError(
            f'compile.components: torchtitan compiles "model" and "loss" and would leave out '
            f"{shown(sorted(strangers))} without a word."
        )
    recomputation = config.activation_checkpoint
    if not isinstance(recomputation, FullAC.Config | SelectiveAC.Config | None):
        warnings.warn(
            f"activation_checkpoint.class: {short_name(owner_of(recomputation))} is used, but the memory and "
            "times that packing and predictions follow are those of SelectiveDocumentAC: nothing is known of "
            "its own.",
            stacklevel=2,
        )
    if not config.wlb.epochs:  # which sets the steps when the run starts
        check_rates(config.lr_scheduler, config.training.steps)
    if config.wlb.loss_weight == "conversation":
        weighted(config.loss)  # complains about a loss that it cannot weigh
    if config.wlb.stop_after:
        seconds_of(config.wlb.stop_after)


def _check_checkpoint(config: TrainerConfig, dims: Dims) -> None:
    checkpoint = config.checkpoint
    keys = ("initial_load_path", "initial_load_in_hf", "create_seed_checkpoint", "last_save_in_hf")
    named = [name for name in keys if getattr(checkpoint, name)]
    if named and not checkpoint.enable:
        raise UserError(
            f"checkpoint.{named[0]}: nothing is loaded or saved as long as checkpoint.enable is false; set "
            "it to true."
        )
    if checkpoint.create_seed_checkpoint and dims.world_size > 1:
        raise UserError(
            "checkpoint.create_seed_checkpoint: one process makes it, for any degrees of the run that starts "
            f"from it; set all of [parallelism]'s degrees to 1, which ask for {dims.world_size} processes."
        )
    for one in dims.own:
        meets = checkpoint.enable and one.divides == "data" and one.degree > 1
        if meets and checkpoint.interval % one.every:
            raise UserError(
                f"checkpoint.interval: weights are the same on all ranks every {one.every} steps, when those "
                f"of {one.axis} meet; a checkpoint has to be a multiple of that, got {checkpoint.interval}."
            )


def _check_model(config: TrainerConfig, dims: ParallelDims) -> None:
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
    if lacking := unsupported(config.model_spec.model):
        cause = "override.imports" if config.override.imports else "base"
        raise UserError(f"{cause}: the model has {'; '.join(lacking)}. {WHAT_TO_DO}")
    if config.checkpoint.last_save_in_hf and adapters(config.model_spec.model):
        raise UserError(
            "checkpoint.last_save_in_hf: LoRA's adapters have no place in that format, and torchtitan would "
            "save the weights without them; leave it out, and the last checkpoint has both."
        )
    _check_shares(config, dims)
    keys = [key for key in ("initial_load_in_hf", "last_save_in_hf") if getattr(config.checkpoint, key)]
    lost = exchanged(config.model_spec)[1] if keys else []
    if lost := [name for name in lost if not name.endswith(ROUTER_BIAS)]:
        raise UserError(
            f"checkpoint.{keys[0]}: Hugging Face's format, as the base's adapter knows it, has no place for "
            f"{len(lost)} tensors of the model, such as {lost[0]}; leave it out."
        )


def _check_shares(config: TrainerConfig, dims: ParallelDims) -> None:
    """Refuses weights that tensor- or expert-parallel ranks cannot share equally, or would add up wrongly."""
    if dims.tp == dims.ep == 1:
        return
    model, degrees = config.model_spec.model, {"tp": ("tensor", dims.tp), "ep": ("expert", dims.ep)}
    with torch.device("meta"):
        weights = dict(model.build().named_parameters())
    for place, node, _, _ in model.traverse(Module.Config, recurse=True):
        if full_name(owner_of(node)) in WHOLE_BIAS and dims.ep == 1:
            raise UserError(
                f"parallelism.expert_parallel_degree: tensor-parallel ranks would add the second bias of "
                f"{place} {dims.tp} times, as torchtitan does not divide it; set it to {dims.tp}, so that "
                "they share whole experts."
            )
        for name, layout in node.sharding_config.state_shardings.items() if node.sharding_config else ():
            weight = weights.get(f"{place}.{name}")
            for axis, kind in layout.per_axis_spmd_types().items() if weight is not None else ():
                what, degree = degrees.get(axis.value, ("", 1))
                if isinstance(kind, spmd_types.Shard) and (size := weight.shape[kind.dim]) % degree:
                    raise UserError(
                        f"parallelism.{what}_parallel_degree: {degree} ranks cannot share the {size:,} "
                        f"entries of {place}.{name} equally; set a degree that divides them."
                    )


def _check_pipeline(config: TrainerConfig, dims: ParallelDims) -> None:
    if not dims.pp_enabled:
        return
    if config.model_spec.pipelining_fn is not pipeline:
        raise UserError(
            f"parallelism.pipeline_parallel_degree: {config.model_spec.name} is not cut into stages, or by a "
            "function that knows micro-batches of one length only; set it to 1."
        )
    try:
        check_stages(config.parallelism, config.model_spec.model)
    except ValueError as error:
        raise UserError(f"parallelism.module_fqns_per_model_part: {error}.") from error
    try:
        check_schedule(config.parallelism, config.compile)
        stages = stage_names(config.parallelism, config.model_spec.model)
        # Slices have their own schedule, but validation runs whole documents in the job's.
        packing = config.wlb.packing
        if not packing.owner.slices or packing.shadow or config.wlb.validation.enabled:
            check_micro_batches(
                canonical_name(config.parallelism.pipeline_parallel_schedule),
                dims.pp,
                len(stages),
                config.training.local_batch_size,
            )
    except ValueError as error:
        raise UserError(f"parallelism.pipeline_parallel_schedule: {error}") from error


def _check_optimizer(config: TrainerConfig) -> None:
    """Tries optimizers on one parameter, with their keywords as arguments, which torch checks. torchtitan
    passes them as a parameter group, whose unknown names torch ignores: `lrr = 0.1` would train at the
    default rate."""
    if not isinstance(config.optimizer, OptimizersContainer.Config):
        return
    for number, group in enumerate(config.optimizer.param_groups):
        key, given = f"optimizer.param_groups.{number}", group.optimizer_kwargs
        try:
            factory = optimizer_factory(owner_of(config.optimizer), group.optimizer_name)
        except NotImplementedError as error:
            raise UserError(f"{key}.optimizer_name: torchtitan says: {error}") from error
        known = inspect.signature(factory).parameters
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
            continue  # it checks its arguments itself
        try:
            factory([torch.nn.Parameter(torch.zeros(1, 1))], **given)
        except Exception as error:  # an argument of a wrong type may raise anything
            raise UserError(
                f"{key}.optimizer_kwargs: {group.optimizer_name} refuses this: {error}. It takes "
                f"{', '.join(list(known)[1:])}."
            ) from error


def _check_groups(config: TrainerConfig, dims: ParallelDims) -> None:
    """Tries the groups' patterns on the names of each stage's parameters: the first that matches has it."""
    patterns = [group.pattern for group in getattr(config.optimizer, "param_groups", [])]
    partly = dims.pp_enabled and adapters(config.model_spec.model)
    if patterns in ([], [".*"]) and not partly:
        return
    config = copy.deepcopy(config)
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        named = config.model_spec.model.build().named_parameters()
    names = [name for name, parameter in named if parameter.requires_grad]
    stages = stage_names(config.parallelism, config.model_spec.model) if dims.pp_enabled else [[""]]
    for number, modules in enumerate(stages):
        where = f"stage {number}" if dims.pp_enabled else "the model"
        inside = tuple(f"{module}." if module else "" for module in modules)
        left = [name for name in names if name.startswith(inside)]
        if not left:
            raise UserError(
                "parallelism.pipeline_parallel_degree: LoRA trains nothing in the stage of "
                f"{', '.join(modules)}, and an optimizer needs weights; take stages of more layers."
            )
        for place, pattern in enumerate(patterns):
            key = f"optimizer.param_groups.{place}.pattern"
            try:
                others = [name for name in left if not re.search(pattern, name)]
            except re.error as error:
                raise UserError(f"{key}: it is no regular expression: {error}.") from error
            if others == left:
                raise UserError(
                    f"{key}: it matches no parameter of {where} that earlier groups leave; take the group "
                    "away, or widen its pattern."
                )
            left = others
        if left and patterns:
            raise UserError(
                f"optimizer.param_groups: no pattern is in the name of {left[0]}, one of {len(left)} such "
                f'parameters of {where}; add a last group with the pattern ".*".'
            )


def _check_parts(config: TrainerConfig) -> None:
    """Tries what torchtitan would only find out in the ranks. A loss of the user's own may need a GPU."""
    if config.training.gc_freq < 1:
        raise UserError("training.gc_freq: garbage is collected every so many steps, at least 1.")
    compiler = config.compile
    if compiler.enable and compiler.backend not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise UserError(f"compile.backend: torch has {', '.join(known)}, and not this.")
    loss = getattr(config.loss, "loss_fn", config.loss)
    if not type(loss).__module__.startswith("torchtitan."):
        return
    logits = torch.zeros(1, 2, config.model_spec.model.vocab_size, requires_grad=True)
    labels = torch.ones(1, 2, dtype=torch.long)
    try:
        with warnings.catch_warnings(action="ignore"):
            loss.build(compile_config=None)(logits, labels, torch.tensor(2.0))
    except RuntimeError as error:
        name = type(loss).__qualname__.removesuffix(".Config")
        raise UserError(f"loss.class: {name} takes no labels that are token ids: {error}") from error


def _check_job(config: TrainerConfig, dims: ParallelDims) -> None:
    if dims.ep > 1 and not has_experts(config.model_spec.model):
        raise UserError("parallelism.expert_parallel_degree: the model has no experts; set it to 1.")
    try:
        job = job_of(config, dims)
    except PlanError as error:
        if error.setting:
            raise
        raise UserError(f"wlb.policy: {error}") from error
    if job.window % job.divisor:
        raise UserError(
            f"training.seq_len: {job.window} tokens do not divide by {job.divisor}, which the "
            f"context-parallel degree ({dims.cp}), the tensor-parallel degree ({dims.tp}), the loss's chunks "
            f"and wlb.packing.length_multiple ({config.wlb.packing.length_multiple}) need."
        )
    try:
        config.wlb.pipeline.make(job.shape)
    except PlanError as error:
        raise UserError(f"wlb.policy: {error}") from error


def validate_inputs(config: TrainerConfig) -> Corpus:
    """Checks the corpus, weights in Hugging Face's format, and the dump folder."""
    corpus = validate_corpus(config)
    if config.checkpoint.initial_load_in_hf:
        check_weights(config, corpus)
    check_place(Path(config.dump_folder))
    return corpus


def validate_files(config: TrainerConfig, world_size: int | None = None) -> None:
    """What a run would only find out itself: `validate_inputs`, and a step is planned, unless the policy is
    slow, such as `fixed_solver`. Attention times are always looked up: without context parallelism only
    predictions read them."""
    wlb, corpus = config.wlb, validate_inputs(config)
    job = configured = job_of(config, parallel_dims(config, world_size))
    setting = "wlb"
    try:
        documents = training_documents(wlb, corpus)
        if job.undecided:
            job = choose(job, documents).job
        planner = job.planner(documents)
        _ = job.latency
        if not job.packing.planning_seconds:
            planner.next(sharded=[0])
            setting = "wlb.policy"
            job.planner(documents).hold_to_rules()
    except PlanError as error:
        raise PlanError(str(error), setting=error.setting or setting) from error
    if wlb.epochs and config.lr_scheduler.total_steps is not None and not configured.undecided:
        check_rates(config.lr_scheduler, steps_of_epochs(job, documents, wlb.epochs))
    beginning(config)


def check_processes(processes: int, gpus: int) -> None:
    if processes > gpus:
        raise UserError(
            f"parallelism: {processes} processes and {gpus} GPU{'s' * (gpus > 1)}: NCCL wants one each; "
            'lower the degrees, or set wlb.device = "cpu".'
        )


def validate_corpus(config: TrainerConfig) -> Corpus:
    """Opens the corpus, and that of the validation, and checks that tokens fit the model's vocabulary, by a
    sample, and that there is something to learn."""
    vocabulary = config.model_spec.model.vocab_size
    wlb, settings = config.wlb, config.wlb.corpus
    key = "wlb.corpus.sources" if settings.sources else "wlb.corpus.path"
    try:
        corpus = open_corpus(settings)
        mixture_sources(settings, corpus)
        tokenizer = corpus.known_tokenizer
        if tokenizer.vocab_size > vocabulary:
            raise UserError(
                f"{key}: the tokenizer of {corpus} has a vocabulary of {tokenizer.vocab_size} tokens, the "
                f"model {config.model_spec.flavor} only {vocabulary}; prepare a corpus with `--vocab-size "
                f"{vocabulary}` or fewer, or choose another base."
            )
        for part in corpus.parts or (corpus,):
            part.check_sample(tokenizer.vocab_size)
            part.check_learned(part.lengths)
        if wlb.validation.enabled:
            key = "wlb.validation." + ("path" if wlb.validation.path else "hold_out")
            settings, held_out = validated_documents(wlb)
            other = open_corpus(settings)
            if wlb.validation.path:
                Corpus.joined([corpus, other])  # has one tokenizer
                other.check_sample(tokenizer.vocab_size)
            for documents in held_out.values():
                other.check_learned(documents.lengths)
    except (CorpusError, PlanError) as error:
        if error.setting:
            raise
        raise UserError(f"{key}: {error}") from error
    return corpus
