"""Checks of a configuration's surroundings: the files that it names, and the devices that it runs on."""

from __future__ import annotations

from pathlib import Path

from wlb_titan.config.documents import (
    mixture_sources,
    open_corpus,
    open_source,
    training_documents,
    validated_documents,
)
from wlb_titan.config.settings import WlbSettings
from wlb_titan.corpus import Corpus, CorpusError
from wlb_titan.errors import PlanError, UserError
from wlb_titan.job import Job
from wlb_titan.kernels.implementations import Device
from wlb_titan.runtime.attention.implementation import check_implementation
from wlb_titan.runtime.checkpoints import beginning
from wlb_titan.runtime.config import TrainerConfig
from wlb_titan.runtime.dump_folder import check_place
from wlb_titan.runtime.hugging_face import check_weights
from wlb_titan.runtime.job import job_of, parallel_dims
from wlb_titan.simulator.choice import choose


def validate_inputs(config: TrainerConfig) -> Corpus:
    """Checks the corpus, weights in Hugging Face's format, and the dump folder."""
    corpus = validate_corpus(config)
    if config.checkpoint.initial_load_in_hf:
        assert config.model_spec is not None
        weights = Path(config.checkpoint.initial_load_path or "")
        check_weights(config.model_spec.model, weights, corpus)
    if config.wlb.validation.enabled:
        try:
            validated_documents(config.wlb)
        except CorpusError as error:
            raise UserError(f"wlb.validation.path: {error}") from error
    check_place(Path(config.dump_folder))
    return corpus


def validate_files(config: TrainerConfig, world_size: int | None = None) -> None:
    """`validate_inputs` and `validate_plan`: what a run would only find out itself."""
    corpus = validate_inputs(config)
    validate_plan(config.wlb, corpus, job_of(config, parallel_dims(config, world_size)))
    beginning(config)


def validate_devices(config: TrainerConfig, processes: int, gpus: int) -> None:
    """Refuses what a machine with that many GPUs and processes of the job cannot run. The CPU, used without
    GPUs or if the configuration asks for it, runs everything."""
    if gpus == 0 or config.wlb.device == "cpu":
        return
    if processes > gpus:
        raise UserError(
            f"parallelism: {processes} processes and {gpus} GPU{'s' * (gpus > 1)}: NCCL wants one each; "
            'lower the degrees, or set wlb.device = "cpu".'
        )
    check_implementation(config, Device("cuda"))


def validate_corpus(config: TrainerConfig) -> Corpus:
    """Opens the corpus and checks that its tokens fit the model's vocabulary. A prepared corpus has no ids
    beyond its tokenizer's; in others they are sampled."""
    assert config.model_spec is not None
    vocabulary = config.model_spec.model.vocab_size
    settings, key = config.wlb.corpus, "wlb.corpus.path"
    try:
        for number, source in enumerate(settings.sources):
            key = f"wlb.corpus.sources.{number}.path"
            open_source(source, settings.tokenizer)
        key = "wlb.corpus.sources" if settings.sources else "wlb.corpus.path"
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
            if part.manifest is None:
                part.check_sample(tokenizer.vocab_size)
    except (CorpusError, PlanError) as error:
        if error.setting:
            raise
        raise UserError(f"{key}: {error}") from error
    return corpus


def validate_plan(wlb: WlbSettings, corpus: Corpus, job: Job) -> None:
    """Plans a step, unless the policy is slow, such as `fixed_solver`. Attention times are always looked up:
    without context parallelism only predictions read them."""
    try:
        documents = training_documents(wlb, corpus)
        if job.undecided:
            job = choose(job, documents).job
        planner = job.planner(documents)
        _ = job.latency
        if not job.packing.planning_seconds:
            planner.next(sharded=[0])
    except PlanError as error:
        raise PlanError(str(error), setting=error.setting or "wlb") from error
