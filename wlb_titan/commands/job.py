"""The job of `wlb-titan plan` and `simulate`: a TOML file with overrides, on its corpus or on lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from wlb_titan.config.documents import training_documents
from wlb_titan.config.load import Resolved
from wlb_titan.config.sources import COMMAND_LINE
from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import named_or_read
from wlb_titan.errors import ConfigError, PlanError, UserError
from wlb_titan.job import Job
from wlb_titan.runtime.models.facts import facts_of


@dataclass(frozen=True)
class Asked:
    """What a command line names.

    Attributes:
        resolved: the configuration that job and documents come from.
        lengths: as given by --lengths.
        typed: all of that in words, for other commands.
    """

    job: Job
    documents: Documents
    resolved: Resolved
    lengths: str | None
    typed: tuple[str, ...]

    @property
    def overridden(self) -> list[str]:
        """The dotted keys that the command line sets."""
        return [key for key, source in self.resolved.provenance.items() if source == COMMAND_LINE]

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Puts before an error in planning where the setting that it blames was written."""
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
    """
    words = [*overrides, *(("--wlb.cluster", cluster) if cluster is not None else ())]
    facts = facts_of(file, words, gpus)
    if lengths is None:
        documents = training_documents(facts.wlb)
        return Asked(facts.job, documents, facts.resolved, None, (str(file), *words))
    found, name = named_or_read(lengths)
    documents = Documents(lengths=found, name=name, seed=None)
    if facts.resolved.provenance["wlb.corpus.seed"] == COMMAND_LINE:
        documents = replace(documents, seed=facts.wlb.corpus.seed)
    typed = (str(file), *words, "--lengths", lengths)
    return Asked(facts.job, documents, facts.resolved, lengths, typed)


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
