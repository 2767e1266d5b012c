"""What is refused before a first step, by what has to be looked at for it:

| function | looks at | is called by |
| --- | --- | --- |
| `validate` | the configuration alone; `model_checks.py` at its model | all that load one: commands, ranks |
| `validate_machine` | the devices here | the launcher of a job that runs here, and each rank |
| `validate_inputs` | the files that it names | `config check`, launchers, `export`, and each rank |
| `validate_files` | these, and what ranks plan from them | `config check`, launchers |
| `agreement.check_same` | what the other ranks have | each rank |

torchtitan's own checks run on copies, and their messages are passed on. Added are the conditions on which
torchtitan would only fail in the middle of a run.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from wlb_titan.config import documents as corpora
from wlb_titan.config.settings import BenchSettings
from wlb_titan.corpus import Corpus, CorpusError
from wlb_titan.errors import PlanError, UserError
from wlb_titan.job import Job, Policy
from wlb_titan.kernels.implementations import device_of
from wlb_titan.packing.once import validating
from wlb_titan.plugins import check_interface, load, short_name
from wlb_titan.runs import CONFIG_FILE, METRICS_FILE
from wlb_titan.runtime import model_checks
from wlb_titan.runtime.agreement import check_rates, saved_plan
from wlb_titan.runtime.attention.implementation import check_implementation
from wlb_titan.runtime.attention.module import ContextAttention
from wlb_titan.runtime.checkpoints import STATES, beginning
from wlb_titan.runtime.compat import owner_of
from wlb_titan.runtime.config import TrainerConfig
from wlb_titan.runtime.configured import (
    configured_degrees,
    degrees_product,
    device_bytes,
    job_of,
    parallel_dims,
)
from wlb_titan.runtime.dump_folder import check_place
from wlb_titan.runtime.ends import seconds_of
from wlb_titan.runtime.hugging_face import check_weights, export_files
from wlb_titan.runtime.loss import weighted
from wlb_titan.runtime.memory import check_memory
from wlb_titan.runtime.meshes import Axis, Dims
from wlb_titan.runtime.models import float8
from wlb_titan.simulator.choice import choose
from wlb_titan.toml.values import shown

ONLY = {
    "parallelism.spmd_backend": ("spmd_types", "our attention takes local tensors"),
    "parallelism.pipeline_parallel_microbatch_size": (1, "a micro-batch is one packed sequence"),
    "parallelism.pipeline_parallel_schedule_csv": ("", "a CSV file is for one number of micro-batches"),
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

NEED_GPUS = dict.fromkeys(("training.enable_cpu_offload", "training.gc_debug"), True)
NEED_GPUS |= {"profiler.enable_memory_snapshot": True, "checkpoint.async_mode": "async_with_pinned_mem"}
NEED_GPUS |= {"optimizer.implementation": "fused_opt_states_bf16"}


def validate(config: TrainerConfig, world_size: int | None) -> Job:
    """The job, on so many processes (None: as many as it needs). Refuses what cannot run; a UserError names
    the key."""
    _check_degrees(config, world_size)
    dims = parallel_dims(config, world_size)
    _check_batch(config, dims)
    _check_settings(config)
    _check_checkpoint(config, dims)
    weights = model_checks.check_model(config, dims)
    check_implementation(config)
    model_checks.check_pipeline(config, dims)
    model_checks.check_optimizer(config)
    model_checks.check_groups(config, weights, dims)
    model_checks.check_parts(config)
    _check_halves(config, dims)
    model_checks.check_experts(config, dims)
    job = _checked_job(config, dims)
    for name, turn in turns_of(config).items():
        try:
            validate(turn, world_size)
        except UserError as error:
            raise UserError(f"wlb.bench.policies: {name} cannot take turns in this job: {error}") from error
    return job


def turns_of(config: TrainerConfig) -> dict[str, TrainerConfig]:
    """The configuration of each policy that [wlb.bench] names; none where the job trains."""
    turns: dict[str, TrainerConfig] = {}
    for name in config.wlb.bench.policies.split(",") if config.wlb.bench.policies else ():
        try:
            parts = zip(("packing", "context", "pipeline"), Policy.parse(name), strict=True)
            settings = {section: getattr(config.wlb, section).named(part) for section, part in parts}
        except UserError as error:
            raise UserError(f"wlb.bench.policies: {name}: {error}.") from error
        turns[name] = replace(config, wlb=replace(config.wlb, bench=BenchSettings(), **settings))
    if len({turn.wlb.packing.regroups for turn in turns.values()}) > 1:
        raise UserError(
            "wlb.packing.asymmetric: only some of wlb.bench.policies can use its stages; leave it out."
        )
    return turns


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
    if unknown := set(config.compile.components) - {"model", "loss"}:
        raise UserError(
            'compile.components: torchtitan compiles only "model" and "loss", and would ignore '
            f"{shown(sorted(unknown))}."
        )
    recomputation = config.activation_checkpoint
    if not isinstance(recomputation, FullAC.Config | SelectiveAC.Config | None):
        warnings.warn(
            f"activation_checkpoint.class: {short_name(owner_of(recomputation))} is used, but packing and "
            "predictions assume the memory and times of SelectiveDocumentAC, because its own are unknown.",
            stacklevel=2,
        )
    if config.wlb.device == "cpu":
        _check_on_cpu(config)
    if not config.wlb.epochs:  # which sets the steps when the run starts
        check_rates(config.lr_scheduler, config.training.steps)
    if config.wlb.loss_weight == "conversation":
        weighted(config.loss)  # complains about a loss that it cannot weigh
    if config.wlb.stop_after:
        seconds_of(config.wlb.stop_after)


def _check_on_cpu(config: TrainerConfig) -> None:
    """Refuses what torchtitan does by means of a GPU alone."""
    float8.check_on_cpu(config.model_spec.model)
    for key, value in NEED_GPUS.items():
        section, name = key.split(".")
        if getattr(getattr(config, section), name, None) == value:
            raise UserError(f"{key}: this needs a GPU, and this job runs on the CPU; leave it out.")


def _check_checkpoint(config: TrainerConfig, dims: Dims) -> None:
    checkpoint = config.checkpoint
    keys = ("initial_load_path", "initial_load_in_hf", "create_seed_checkpoint", "last_save_in_hf")
    named = [name for name in keys if getattr(checkpoint, name)]
    if named and not checkpoint.enable:
        raise UserError(
            f"checkpoint.{named[0]}: nothing is loaded or saved as long as checkpoint.enable is false; set "
            "it to true."
        )
    if unknown := set(checkpoint.exclude_from_loading) - set(STATES):
        raise UserError(
            f"checkpoint.exclude_from_loading: {shown(min(unknown))} is not one of {', '.join(STATES)}."
        )
    if checkpoint.create_seed_checkpoint and dims.world_size > 1:
        raise UserError(
            "checkpoint.create_seed_checkpoint: one process makes a seed checkpoint, whatever the degrees of "
            "the run that starts from it; set all degrees of [parallelism] to 1, which now need "
            f"{dims.world_size} processes."
        )
    for dimension in dims.own:
        meets = checkpoint.enable and dimension.divides == "data" and dimension.degree > 1
        if meets and checkpoint.interval % dimension.every:
            raise UserError(
                f"checkpoint.interval: weights are the same on all ranks only every {dimension.every} steps, "
                f"when the ranks of {dimension.axis} meet; set a multiple of {dimension.every}, not "
                f"{checkpoint.interval}."
            )


def _check_halves(config: TrainerConfig, dims: Dims) -> None:
    """Loads the halves of the user's own parts that move tensors, which planning does without."""
    halves = [("wlb.policy", config.wlb.context.owner.attention, ContextAttention)]
    halves += [(f"wlb.dimensions.{place}.name", dim.runtime, Axis) for place, dim in enumerate(dims.own)]
    for key, target, interface in halves:
        try:
            if target:
                check_interface(load(target), interface)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error


def _checked_job(config: TrainerConfig, dims: Dims) -> Job:
    try:
        job = job_of(config, dims)
        config.wlb.pipeline.make(job.shape)
    except PlanError as error:
        if error.setting:
            raise
        raise UserError(f"wlb.policy: {error}") from error
    if job.window % job.divisor:
        raise UserError(
            f"training.seq_len: {job.window} tokens are not a multiple of {job.divisor}, as the "
            f"context-parallel degree ({dims.cp}), the tensor-parallel degree ({dims.tp}), the loss's "
            "chunks and products in float8 require."
        )
    return job


def validate_inputs(config: TrainerConfig) -> Corpus:
    """Checks the corpus, weights in Hugging Face's format, and the dump folder."""
    wlb = config.wlb
    read = {f"wlb.corpus.sources.{number}.path": s.path for number, s in enumerate(wlb.corpus.sources)}
    read = read or {"wlb.corpus.path": wlb.corpus.path}
    read["wlb.validation.path"] = wlb.validation.path
    read["checkpoint.initial_load_path"] = config.checkpoint.initial_load_path or ""
    check_place(config.dump_folder, config.checkpoint.folder, read)
    corpus = validate_corpus(config)
    if config.checkpoint.initial_load_in_hf:
        check_weights(config, model_checks.trained_spec(config), corpus)
    if config.checkpoint.last_save_in_hf:
        export_files(config, corpus)
    folder = Path(config.dump_folder)
    if config.wlb.bench.policies and any((folder / run).exists() for run in (METRICS_FILE, CONFIG_FILE)):
        raise UserError(
            f"dump_folder: {folder} contains a run, which a bench must not change; name another folder."
        )
    return corpus


def validate_files(config: TrainerConfig, job: Job) -> None:
    """What a run would only find out itself: `validate_inputs`, and whether it goes on from its checkpoint.
    A step is planned, unless the policy is slow, such as `fixed_solver`, and one of each source's validation.
    Attention times are always looked up: predictions need them, and packing does, whatever the degrees."""
    wlb, corpus = config.wlb, validate_inputs(config)
    for name, turn in turns_of(config).items():
        validate_files(turn, job.under(Policy.parse(name)))
    configured, setting = job, ""
    try:
        documents = corpora.training_documents(wlb, corpus)
        if job.undecided:
            job = choose(job, documents).job
        planner = job.planner(documents)
        _ = job.latency
        if not job.packing.planning_seconds:
            planner.next(sharded=[0])
            setting = "wlb.policy"
            job.planner(documents).hold_to_rules()
        setting = ""
        if wlb.validation.enabled:
            for held_out in corpora.validated_documents(wlb, corpus)[1].values():
                validating(job).planner(held_out).next()
        begun = beginning(config).step
        going_on = replace(config, checkpoint=replace(config.checkpoint, load_step=begun))
        if begun > 0 and (state := saved_plan(going_on)) is not None:
            job.planner(documents).load_state_dict(state)
    except PlanError as error:
        raise PlanError(str(error), setting=error.setting or setting) from error
    if wlb.epochs and config.lr_scheduler.total_steps is not None and not configured.undecided:
        check_rates(config.lr_scheduler, corpora.steps_of_epochs(job, documents, wlb.epochs))


def validate_machine(config: TrainerConfig, job: Job, processes: int) -> None:
    """Refuses what so many of the job's processes cannot do on the devices here."""
    gpus = 0 if config.wlb.device == "cpu" else torch.accelerator.device_count()
    if not gpus:
        _check_on_cpu(config)
    elif processes > gpus:
        raise UserError(
            f"parallelism: {processes} processes need a GPU each, and there {'are' if gpus > 1 else 'is'} "
            f'{gpus}; lower the degrees, or set wlb.device = "cpu".'
        )
    here = torch.accelerator.current_accelerator() if gpus else None
    check_implementation(config, device_of(here or torch.device("cpu")))
    if gpus:
        check_memory(job, device_bytes())


def validate_corpus(config: TrainerConfig) -> Corpus:
    """Opens the corpus, and that of the validation, and checks that tokens fit the model's vocabulary, by a
    sample, and that there is something to learn."""
    vocabulary = config.model_spec.model.vocab_size
    wlb, settings = config.wlb, config.wlb.corpus
    key = "wlb.corpus.sources" if settings.sources else "wlb.corpus.path"
    try:
        corpus = corpora.open_corpus(settings)
        corpora.mixture_sources(settings, corpus)
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
            validation, held_out = corpora.validated_documents(wlb, corpus)
            if wlb.validation.path:
                Corpus.joined([corpus, validation])  # has one tokenizer
                validation.check_sample(tokenizer.vocab_size)
            for documents in held_out.values():
                validation.check_learned(documents.lengths)
    except (CorpusError, PlanError) as error:
        if error.setting:
            raise
        raise UserError(f"{key}: {error}") from error
    return corpus
