"""The job of `wlb-titan plan` and `simulate`: a TOML file with overrides, on its corpus or on lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wlb_titan.config.load import Resolved
from wlb_titan.config.sources import COMMAND_LINE
from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import named_or_read
from wlb_titan.errors import ConfigError, PlanError, UserError
from wlb_titan.job import Job
from wlb_titan.runtime.data.corpus import training_documents
from wlb_titan.runtime.models.facts import facts_of


@dataclass(frozen=True)
class Asked:
    """What a command line names.

    Attributes:
        file: TOML file.
        job, documents: what is planned.
        resolved: the configuration that they come from.
        lengths: as given by --lengths.
        typed: all of that in words, for other commands.
    """

    file: Path
    job: Job
    documents: Documents
    resolved: Resolved
    lengths: str | None
    typed: tuple[str, ...]

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
    file: Path,
    overrides: Sequence[str] = (),
    *,
    lengths: str | None = None,
    cluster: str | None = None,
    gpus: int | None = None,
) -> Asked:
    """What a command's arguments name.

    Args:
        lengths: as of `named_or_read`, instead of the file's corpus.
        cluster: as of `load_cluster`, instead of the file's.
        gpus: what the degrees must multiply to, if that is said.

    Raises:
        UserError: a file, an option or an override is wrong.
    """
    words = [*overrides, *(("--wlb.cluster", cluster) if cluster is not None else ())]
    facts = facts_of(file, words, gpus)
    if lengths is None:
        documents = training_documents(facts.wlb)
        return Asked(file, facts.job, documents, facts.resolved, None, (str(file), *words))
    found, name = named_or_read(lengths)
    documents = Documents(lengths=found, name=name, seed=None)
    if facts.resolved.provenance["wlb.corpus.seed"] == COMMAND_LINE:
        documents = replace(documents, seed=facts.wlb.corpus.seed)
    typed = (str(file), *words, "--lengths", lengths)
    return Asked(file, facts.job, documents, facts.resolved, lengths, typed)


def describe_job(job: Job, documents: Documents) -> str:
    """What is planned or simulated: a line on the corpus, one on the job, and of a mixture its sources."""
    head, *sources = documents.describe(job.window, job.micro_batches * job.window)
    pipeline = f", {job.schedule}" if job.degrees.pipeline > 1 else ""
    line = (
        f"{head} {job.micro_batches} micro-batches a step, context window {job.window:,} tokens, "
        f"{job.degrees} = {job.degrees.ranks} ranks{pipeline}, {job.memory.checkpointing} checkpointing, on "
        f"{job.cluster.name}. Work by {job.packing.cost_model}."
    )
    return "\n".join([line, *sources])
