"""The job of `wlb-titan plan` and `simulate`: a TOML file or a row of Table 1, with options over it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import click
import tomli

from wlb_titan.config.ranges import check_ranges
from wlb_titan.config.values import Mismatch, convert, describe
from wlb_titan.cost.attention_choice import named_attention
from wlb_titan.cost.cluster import load_cluster
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import PAPER_DEGREES, PAPER_MODELS
from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import NAMED, named_or_read
from wlb_titan.errors import ConfigError, PlanError, UserError
from wlb_titan.job import Job
from wlb_titan.memory.settings import MemorySettings
from wlb_titan.packing import POLICIES
from wlb_titan.pipeline.schedule import SCHEDULES

DEGREES = {
    "tensor_parallel": "tensor",
    "context_parallel": "context",
    "pipeline_parallel": "pipeline",
    "data_parallel": "shard",
    "expert_parallel": "expert",
}
NOT_OPTIONS = ("cost_model", "length_multiple")
OPTIONS = {
    "training.seq_len": "context_window",
    "training.global_batch_size": "micro_batches",
    "parallelism.pipeline_parallel_schedule": "schedule",
    "parallelism.tensor_parallel_degree": "tensor_parallel",
    "parallelism.pipeline_parallel_degree": "pipeline_parallel",
    "sharding.policy": "sharding",
    "corpus.path": "lengths",
}
"""Options that are not called as the last part of the key over which they go."""


class Setting(click.ParamType):
    """A value of a TOML key, as TOML or as plain words; a list also with commas alone."""

    def __init__(self, hint: Any) -> None:
        self._hint = hint
        self.name = describe(hint)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        readings: list[Any] = []
        for text in (value, f"[{value}]"):
            try:
                readings.append(tomli.loads(f"value = {text}")["value"])
            except tomli.TOMLDecodeError:
                continue
        for reading in [*readings, value]:
            try:
                return convert(reading, self._hint)
            except Mismatch:
                continue
        return self.fail(f"{value!r} is not {describe(self._hint)}.", param, ctx)


def packing_options(command: Any) -> Any:
    """The settings of all packing policies as options; one not given keeps the TOML file's value."""
    found: dict[str, tuple[list[str], Any, str, Any]] = {}
    for name in POLICIES.names:
        config = POLICIES.find(name).Config
        hints, texts = get_type_hints(config), documented(config)
        for field in fields(config):
            if field.name not in NOT_OPTIONS:
                default = field.default if field.default is not MISSING else None
                found.setdefault(field.name, ([], hints[field.name], texts.get(field.name, ""), default))
                found[field.name][0].append(name)
    for key, (names, hint, text, default) in reversed(found.items()):
        first = text.replace("\n", " ").split(". ")[0].rstrip(".")
        shown = "" if default is None else f"  [default: {default}]"
        option = click.option(
            f"--{key.replace('_', '-')}",
            type=Setting(hint),
            metavar="VALUE",
            help=f"{', '.join(names)}: {first}.{shown}",
        )
        command = option(command)
    return command


@cache
def documented(cls: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, those of its bases included."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError):
            continue
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                texts[field.target.id] = inspect.cleandoc(str(text.value.value))
    return texts


lengths_option = click.option(
    "--lengths",
    metavar="|".join([*NAMED, "FILE"]),
    help="Documents of these lengths instead of a corpus: a named distribution (docs/simulator.md), or a "
    "text file with one document's length in tokens a line.",
)


@contextmanager
def placed(config: Path | None, given: Mapping[str, Any]) -> Iterator[None]:
    """Says of a setting that is found wrong in planning where it was written.

    Args:
        config: the TOML file, if there is one.
        given: the options on the command line, by their names.

    Raises:
        PlanError: the error, after the option's name.
        ConfigError: the error, after file, line and value.
    """
    try:
        yield
    except ConfigError:
        raise
    except UserError as error:
        option = OPTIONS.get(error.setting, error.setting.rpartition(".")[2])
        if option in given:
            raise PlanError(f"--{option.replace('_', '-')}: {error}") from error
        if config is None or not error.setting:
            raise
        from wlb_titan.runtime.models.load import load_config

        raise ConfigError(load_config(config).placed(error)) from error


def load_job(
    config: Path | None, given: Mapping[str, Any], paper: Callable[[Degrees], Degrees]
) -> tuple[Job, Documents]:
    """What a command's arguments name.

    Args:
        config: TOML file of a training run, on its corpus if no lengths are named; None: a row of the
            paper's Table 1.
        given: the options on the command line, by their names; they go over both. `lengths` is as of
            `named_or_read`.
        paper: which of the row's degrees count.

    Raises:
        UserError: a file or an option is wrong.
    """
    drawn = None
    if "lengths" in given:
        found, name = named_or_read(given["lengths"])
        drawn = Documents(lengths=found, name=name, seed=None)
    if config is not None:
        job, documents = _from_toml(config, drawn)
    elif drawn is not None:
        job, documents = _paper_row(given, paper), drawn
    else:
        raise PlanError("Name a TOML file, or document lengths with --lengths, or both.")
    if "seed" in given:
        documents = replace(documents, seed=given["seed"])
    return _changed(job, given), documents


def _from_toml(path: Path, documents: Documents | None) -> tuple[Job, Documents]:
    from wlb_titan.runtime.models.load import load_config

    config = load_config(path).config
    # torchtitan takes seconds to import, so that is left until the file has been found good.
    from wlb_titan.runtime.job import configured_job, parallel_dims, training_documents

    if documents is None:
        documents = training_documents(config.wlb)
    # A data-parallel degree of -1, as many as the job turns out to have, is 1 here.
    return configured_job(config, parallel_dims(config)), documents


def _paper_row(given: Mapping[str, Any], paper: Callable[[Degrees], Degrees]) -> Job:
    row = given["model"]
    if row not in PAPER_DEGREES:
        raise PlanError(f"There is no model {row!r}; there are {', '.join(PAPER_DEGREES)}.")
    size, window = row.split("-")
    degrees = _degrees(paper(PAPER_DEGREES[row]), given)
    tokens = given.get("context_window", int(window.removesuffix("K")) * 1024)
    return Job(
        model=PAPER_MODELS[size],
        degrees=degrees,
        window=tokens,
        micro_batches=given.get("micro_batches", degrees.pipeline * degrees.data),
        multiple=degrees.tensor,
        memory=MemorySettings(window=tokens),
    )


def _changed(job: Job, given: Mapping[str, Any]) -> Job:
    """The job with the options over it."""
    degrees = _degrees(job.degrees, given)
    if "gpus" in given and not given.get("search"):
        degrees.check_ranks(given["gpus"])
    changes: dict[str, Any] = {"degrees": degrees}
    if "context_window" in given:
        changes["window"] = given["context_window"]
        changes["memory"] = replace(job.memory, window=given["context_window"])
    if "micro_batches" in given:
        changes["micro_batches"] = given["micro_batches"]
    elif degrees.data != job.degrees.data:  # as many on each replica
        changes["micro_batches"] = job.replica_micro_batches * degrees.data
    if degrees != job.degrees or "micro_batches" in given:
        changes |= {"run": None, "stage_layers": ()}
    if "schedule" in given:
        changes |= {"schedule": given["schedule"], "stage_layers": ()}
        changes["chunks"] = 1 if given["schedule"] in ("GPipe", "1F1B") else 2
    if "chunks" in given:
        changes |= {"chunks": given["chunks"], "stage_layers": ()}
    for name in ("checkpointing", "offload"):
        if name in given:
            changes["memory"] = replace(changes.get("memory", job.memory), **{name: given[name]})
    if "cluster" in given:
        changes["cluster"] = load_cluster(given["cluster"])
    if given.get("no_overlap"):
        changes["overlap"] = False
    changes |= {name: given[name] for name in ("tensor_overlap", "routing_imbalance") if name in given}
    if "sharding" in given:
        changes["sharding"] = job.sharding.named(given["sharding"])
    if "order" in given:
        changes["order"] = job.order.named(given["order"])
    packing = job.packing.named(given.get("policy", job.packing.name))
    if "cost_model" in given:
        packing = replace(packing, cost_model=given["cost_model"])
    job = replace(job, packing=packing, **changes)
    if "attention" in given:
        job = replace(job, attention=named_attention(given["attention"], job.attention_shape))
    if job.schedule not in SCHEDULES and job.degrees.pipeline > 1 and "schedule" in given:
        raise PlanError(f"No schedule is called {job.schedule!r}; there are {', '.join(SCHEDULES)}.")
    return with_settings(job, given)


def with_settings(job: Job, given: Mapping[str, Any]) -> Job:
    """The job with the options over its packing policy that are settings of it."""
    names = {field.name for field in fields(job.packing)} - set(NOT_OPTIONS)
    packing = replace(job.packing, **{name: given[name] for name in names if name in given})
    check_ranges(packing, {})
    return replace(job, packing=packing)


def _degrees(degrees: Degrees, given: Mapping[str, Any]) -> Degrees:
    """The degrees with the options over them; `data_parallel` shards."""
    changed = {field: given[name] for name, field in DEGREES.items() if name in given}
    if "data_parallel" in given:
        changed["replicate"] = 1
    return replace(degrees, **changed)


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
