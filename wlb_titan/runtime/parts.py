"""A trainer's parts: ours in the places of torchtitan's, as the rest of a configuration asks for them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

from wlb_titan.job import Job
from wlb_titan.runtime.attention.module import DocumentAttention
from wlb_titan.runtime.compat import Dims
from wlb_titan.runtime.data.corpus import open_corpus
from wlb_titan.runtime.data.dataloader import PlannedDataLoader
from wlb_titan.runtime.data.tokenizer import Tokenizer
from wlb_titan.runtime.loss import weighted
from wlb_titan.runtime.pipeline.regroup import regrouped_pipeline
from wlb_titan.runtime.validator import Validator

if TYPE_CHECKING:
    from wlb_titan.runtime.trainer import Trainer


def with_our_parts(config: Trainer.Config, job: Job) -> Trainer.Config:
    """A copy that a trainer may change, with our tokenizer, loader, validator, loss and stages."""
    wlb, spec = config.wlb, config.model_spec
    assert spec is not None
    stages: Any = spec.pipelining_fn
    if job.packing.regroups:
        stages = partial(regrouped_pipeline, stages)
    return dataclasses.replace(
        config,
        comm=dataclasses.replace(config.comm),
        training=dataclasses.replace(config.training),
        hf_assets_path=str(open_corpus(wlb.corpus).tokenizer_path),
        tokenizer=Tokenizer.Config(),
        dataloader=PlannedDataLoader.Config(
            corpus=wlb.corpus, job=job, loss_weight=wlb.loss_weight, hold_out=wlb.validation.hold_out
        ),
        validator=Validator.Config(enable=wlb.validation.enabled, freq=max(wlb.validation.every, 1)),
        loss=weighted(config.loss) if wlb.loss_weight == "conversation" else config.loss,
        model_spec=dataclasses.replace(spec, pipelining_fn=stages),
    )


def tell_the_job(config: Trainer.Config, job: Job, shadow: Job | None, dims: Dims) -> None:
    """Tells the loader what the job is, and this rank's place in it; and attention what computes it.

    Args:
        config: as of `with_our_parts`; is changed.
        shadow: what is only planned; None for nothing.
    """
    assert config.model_spec is not None
    for _, attention, _, _ in config.model_spec.traverse(DocumentAttention.Config):
        attention.implementation = config.wlb.attention.implementation
        attention.sm_margin = config.wlb.attention.sm_margin
    loader = config.dataloader
    loader.job, loader.shadow = job, shadow
    loader.context_rank = dims.place("cp")
    if dims.tp_enabled and config.parallelism.enable_sequence_parallel:
        mesh = dims.get_mesh("tp")
        loader.tensor_rank = mesh.get_local_rank(), mesh.size()
