"""The job of `wlb-titan plan` and `simulate`: a TOML file or a row of Table 1, with overrides over it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from wlb_titan.config.load import Resolved
from wlb_titan.config.sketch import JSON, resolve_sketch, sketched_job
from wlb_titan.config.sources import COMMAND_LINE
from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import named_or_read
from wlb_titan.errors import ConfigError, PlanError, UserError
from wlb_titan.job import Job
from wlb_titan.packing import POLICIES
from wlb_titan.runtime.data.corpus import training_documents
from wlb_titan.runtime.models.facts import facts_of

FORMER = {
    "checkpointing": "activation_checkpoint.class",
    "chunks": "parallelism.pipeline_parallel_layers_per_stage",
    "context-parallel": "parallelism.context_parallel_degree",
    "context-window": "training.seq_len",
    "data-parallel": "parallelism.data_parallel_shard_degree",
    "expert-parallel": "parallelism.expert_parallel_degree",
    "micro-batches": "training.global_batch_size",
    "order": "wlb.pipeline.order",
    "pipeline-parallel": "parallelism.pipeline_parallel_degree",
    "policy": "wlb.packing.policy",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "seed": "wlb.corpus.seed",
    "sharding": "wlb.sharding.policy",
    "tensor-parallel": "parallelism.tensor_parallel_degree",
}
"""Former options -> the keys that say the same. Settings of packing policies were options, too."""


@dataclass(frozen=True)
class Asked:
    """What a command line names.

    Attributes:
        file: TOML file; None: there is none.
        model: as of `sketch_of`, where there is no file.
        job, documents: what is planned.
        resolved: the configuration that they come from.
        lengths: as given by --lengths.
    """

    file: Path | None
    model: str
    job: Job
    documents: Documents
    resolved: Resolved
    lengths: str | None

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Says of a setting that is found wrong in planning where it was written.

        Raises:
            PlanError: the error, after the option's name.
            ConfigError: the error, after file, line and value.
        """
        try:
            yield
        except ConfigError:
            raise
        except UserError as error:
            if not error.setting:
                raise
            if error.setting == "corpus.path" and self.lengths is not None:
                raise PlanError(f"--lengths: {error}") from error
            raise ConfigError(self.resolved.placed(error)) from error

    @property
    def changes(self) -> dict[str, Any]:
        """What the command line says over the file, by dotted key."""
        entries = [entry for entry in self.resolved.entries if entry.source == COMMAND_LINE]
        return {".".join(map(str, entry.path)): entry.value for entry in entries}


def load_job(
    words: Sequence[str],
    *,
    lengths: str | None,
    model: str,
    cluster: str | None = None,
    gpus: int | None = None,
) -> Asked:
    """What a command's arguments name.

    Args:
        words: a TOML file of a training run or a model's config.json, if there is one, and overrides.
        lengths: as of `named_or_read`, instead of the file's corpus.
        model: a row of the paper's Table 1, where there is no file.
        cluster: as of `load_cluster`, instead of the file's.
        gpus: what the degrees must multiply to, if that is said.

    Raises:
        UserError: a file, an option or an override is wrong.
    """
    file, overrides = None, list(words)
    if overrides and not overrides[0].startswith("--"):
        file = Path(overrides.pop(0))
    if file is not None and file.suffix == JSON:
        file, model = None, str(file)
    _refuse_former_options(overrides)
    if cluster is not None:
        overrides += ["--wlb.cluster", cluster]
    documents = None
    if lengths is not None:
        found, name = named_or_read(lengths)
        documents = Documents(lengths=found, name=name, seed=None)
    if file is not None:
        facts = facts_of(file, overrides, gpus)
        job, resolved = facts.job, facts.resolved
        documents = documents or training_documents(facts.wlb)
    elif documents is None:
        raise PlanError("Name a TOML file, or document lengths with --lengths, or both.")
    else:
        resolved = resolve_sketch(model, overrides)
        job = resolved.check(lambda config: sketched_job(model, config, gpus))
        if gpus is not None:
            job.degrees.check_ranks(gpus)
    if lengths is not None and resolved.provenance["wlb.corpus.seed"] == COMMAND_LINE:
        documents = replace(documents, seed=resolved.config.wlb.corpus.seed)
    return Asked(file, model, job, documents, resolved, lengths)


def _refuse_former_options(words: Sequence[str]) -> None:
    """Raises UserError for a word that is no override, but looks like an option."""
    context = click.get_current_context(silent=True)
    options = [name for p in context.command.params for name in p.opts] if context else []
    for word in words:
        name = word.partition("=")[0]
        if not name.startswith("--") or "." in name or name == "--":
            continue
        field = name.removeprefix("--").replace("-", "_")
        key = FORMER.get(name.removeprefix("--")) or (
            f"wlb.packing.{field}" if POLICIES.having(field) else ""
        )
        if key:
            raise UserError(f"{name} is no option any more: write its key, as in training: -- --{key} VALUE.")
        if name in options:
            raise UserError(f"{name} is an option of the command: write it before --.")
        if near := difflib.get_close_matches(name, options, n=1):
            raise UserError(f"There is no option {name}. Did you mean {near[0]}?")


def describe_job(job: Job, documents: Documents) -> str:
    """What is planned or simulated: a line on the corpus, one on the job, and of a mixture its sources."""
    head, *sources = documents.describe(job.window, job.micro_batches * job.window)
    pipeline = f", {job.schedule}" if job.degrees.pipeline > 1 else ""
    line = (
        f"{head} {job.micro_batches} micro-batches a step, context window {job.window:,} tokens, "
        f"{job.degrees} = {job.degrees.ranks} GPUs{pipeline}, {job.memory.checkpointing} checkpointing, on "
        f"{job.cluster.name}. Work by {job.packing.cost_model}."
    )
    return "\n".join([line, *sources])
