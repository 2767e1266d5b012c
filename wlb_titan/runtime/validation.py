"""Checks of a whole configuration before anything starts.

Where torchtitan has a check of its own, that one is run, on copies, and its words are passed on; what is
added are the conditions that torchtitan would only meet in the middle of a run.
"""

from __future__ import annotations

import copy

from torchtitan.distributed import ParallelDims

from wlb_titan.corpus import Corpus, CorpusError
from wlb_titan.errors import UserError
from wlb_titan.planner.errors import PlanError
from wlb_titan.planner.pipeline_runs import check_order
from wlb_titan.runtime.lengths import length_divisor
from wlb_titan.runtime.pipeline_schedules import (
    canonical_name,
    check_micro_batches,
    check_schedule,
    stage_names,
)
from wlb_titan.runtime.trainer import Trainer


def degrees_product(config: Trainer.Config) -> int:
    """Processes that the configured degrees need, with a data-parallel degree of 1 where it is -1."""
    p = config.parallelism
    return (
        p.data_parallel_replicate_degree
        * max(p.data_parallel_shard_degree, 1)
        * p.pipeline_parallel_degree
        * p.context_parallel_degree
        * p.tensor_parallel_degree
    )


def validate(config: Trainer.Config, world_size: int | None) -> None:
    """Raises if the configuration cannot run on `world_size` processes (None: as many as its degrees need).

    Raises:
        UserError: the message starts with the key path concerned.
    """
    _check_degrees(config, world_size)
    dims = ParallelDims.from_config(config.parallelism, world_size or degrees_product(config))
    _check_batch(config, dims)
    _check_lengths(config)
    _check_model(config)
    _check_pipeline(config, dims)


def validate_corpus(config: Trainer.Config) -> None:
    """Raises UserError if the corpus is missing or its tokens do not fit the model's vocabulary."""
    try:
        corpus = Corpus.open(config.wlb.corpus.path)
    except CorpusError as error:
        raise UserError(f"wlb.corpus.path: {error}") from error
    assert config.model_spec is not None
    vocabulary = config.model_spec.model.vocab_size
    if corpus.manifest.vocab_size > vocabulary:
        raise UserError(
            f"wlb.corpus.path: the corpus {config.wlb.corpus.path!r} has a vocabulary of "
            f"{corpus.manifest.vocab_size} tokens, the model {config.model_spec.flavor} only {vocabulary}; "
            f"prepare a corpus with `--vocab-size {vocabulary}` or fewer, or choose another base."
        )


def _check_degrees(config: Trainer.Config, world_size: int | None) -> None:
    p = config.parallelism
    names = (
        "data_parallel_replicate_degree",
        "pipeline_parallel_degree",
        "context_parallel_degree",
        "tensor_parallel_degree",
        "expert_parallel_degree",
    )
    for name in names:
        if getattr(p, name) < 1:
            raise UserError(f"parallelism.{name}: a degree is at least 1, got {getattr(p, name)}.")
    if p.data_parallel_shard_degree < 1 and p.data_parallel_shard_degree != -1:
        raise UserError(
            "parallelism.data_parallel_shard_degree: a degree is at least 1, or -1 for all processes that "
            f"the other degrees leave, got {p.data_parallel_shard_degree}."
        )
    product = degrees_product(config)
    fits = world_size is None or (
        world_size % product == 0 if p.data_parallel_shard_degree == -1 else world_size == product
    )
    if not fits:
        raise UserError(
            f"parallelism: {world_size} processes do not fit the degrees: data parallel replicate "
            f"{p.data_parallel_replicate_degree} x shard {p.data_parallel_shard_degree} x pipeline "
            f"{p.pipeline_parallel_degree} x context {p.context_parallel_degree} x tensor "
            f"{p.tensor_parallel_degree} need {product}"
            + (" or a multiple of it." if p.data_parallel_shard_degree == -1 else ".")
        )
    if p.spmd_backend != "spmd_types":
        raise UserError(
            f"parallelism.spmd_backend: wlb_titan's attention takes local tensors and needs 'spmd_types', "
            f"torchtitan's default; got {p.spmd_backend!r}."
        )


def _check_batch(config: Trainer.Config, dims: ParallelDims) -> None:
    local, total = config.training.local_batch_size, config.training.global_batch_size
    data_parallel = dims.dp_replicate * dims.dp_shard
    if local < 1:
        raise UserError(f"training.local_batch_size: at least 1 micro-batch a rank, got {local}.")
    if total > 0 and total % (local * data_parallel) != 0:
        raise UserError(
            f"training.global_batch_size: {total} micro-batches cannot be shared equally: it must be a "
            f"multiple of local_batch_size ({local}) x the data-parallel degree ({data_parallel})."
        )
    if config.parallelism.pipeline_parallel_microbatch_size != 1:
        raise UserError(
            "parallelism.pipeline_parallel_microbatch_size: a micro-batch is one packed sequence, so this "
            f"must be 1, got {config.parallelism.pipeline_parallel_microbatch_size}."
        )


def _check_lengths(config: Trainer.Config) -> None:
    if (multiple := config.wlb.packing.length_multiple) < 1:
        raise UserError(f"wlb.packing.length_multiple: at least 1 token, got {multiple}.")
    divisor = length_divisor(config)
    if config.training.seq_len % divisor != 0:
        raise UserError(
            f"training.seq_len: {config.training.seq_len} tokens do not divide by {divisor}, which the "
            f"context-parallel degree ({config.parallelism.context_parallel_degree}), the tensor-parallel "
            f"degree ({config.parallelism.tensor_parallel_degree}), the loss's chunks and "
            f"wlb.packing.length_multiple ({config.wlb.packing.length_multiple}) need."
        )


def _check_model(config: Trainer.Config) -> None:
    assert config.model_spec is not None
    try:
        copy.deepcopy(config.model_spec.model).update_from_config(config=config)
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise UserError(f"base: the model refuses this configuration: {error}") from error


def _check_pipeline(config: Trainer.Config, dims: ParallelDims) -> None:
    if not dims.pp_enabled:
        return
    assert config.model_spec is not None
    if config.model_spec.pipelining_fn is None:
        raise UserError(
            f"parallelism.pipeline_parallel_degree: {config.model_spec.name} cannot be pipelined."
        )
    try:
        check_schedule(config.parallelism, config.compile, config.activation_checkpoint)
        check_micro_batches(
            config.parallelism.pipeline_parallel_schedule,
            dims.pp,
            len(stage_names(config.parallelism, config.model_spec.model)),
            config.training.local_batch_size,
        )
    except ValueError as error:
        raise UserError(f"parallelism.pipeline_parallel_schedule: {error}") from error
    try:
        check_order(config.wlb.pipeline.order, canonical_name(config.parallelism.pipeline_parallel_schedule))
    except PlanError as error:
        raise UserError(f"wlb.pipeline.order: {error}") from error
