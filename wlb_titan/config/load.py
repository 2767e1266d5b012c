"""From a TOML file and command-line overrides to a configuration over a base."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from annotated_types import Ge, Gt, Interval, MinLen

from wlb_titan.config.reference import meaning_of
from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.dimensions.dimension import TORCHTITAN
from wlb_titan.errors import ConfigError, UserError
from wlb_titan.job import Policy
from wlb_titan.packing import POLICIES
from wlb_titan.packing.policy import MOST_TOKENS
from wlb_titan.pipeline.order import ORDERS
from wlb_titan.toml.build import Builder, Entry, dotted
from wlb_titan.toml.sources import COMMAND_LINE, Leaf, Table, read_sources, string
from wlb_titan.toml.values import NONE, in_words, key_text, shown, to_text

T = TypeVar("T")

CHOSEN = {"packing": POLICIES, "context": STRATEGIES, "pipeline": ORDERS}
"""Sections of [wlb] whose classes `wlb.policy` names, in the order of its parts."""

LOCKED = {
    "model_spec": "the model cannot be set because it comes with the base; choose another `base` instead.",
    "hf_assets_path": "this has no effect because the tokenizer is that of the corpus; set wlb.corpus.path.",
    "tokenizer": "this has no effect because the tokenizer is that of the corpus; set wlb.corpus.path.",
    "validator.freq": "this has no effect; set wlb.validation.every instead.",
    "validator.steps": "this has no effect because all documents of wlb.validation are read; leave it out.",
    "validator.dataloader": "this has no effect; set wlb.validation.hold_out or wlb.validation.path instead.",
    "dataloader": "this has no effect because documents come from the corpus; set wlb.corpus.path.",
    "parallelism.context_parallel_load_balancer": "this has no effect; the second part of "
    "wlb.policy says how tokens are spread over context-parallel ranks.",
    "parallelism.context_parallel_ptrr_mask_key": "this has no effect; the second part of "
    "wlb.policy says how tokens are spread over context-parallel ranks.",
}
"""What the user cannot set, with the reason."""

_DEGREE = (Interval(ge=1, le=1 << 20),)
_COUNT = (Ge(1),)
_FROM_ZERO = (Ge(0),)
_SHARE = (Interval(ge=0, le=1),)
_SECONDS = (Interval(ge=1, le=30 * 24 * 3600),)
_NOT_EMPTY = (MinLen(1),)

LIMITS = {
    "dump_folder": _NOT_EMPTY,
    "training.local_batch_size": _DEGREE,
    "training.global_batch_size": (Interval(ge=-1, le=1 << 20),),
    "training.seq_len": (Interval(ge=2, le=MOST_TOKENS),),
    "training.max_norm": (Gt(0),),
    "training.steps": _COUNT,
    **{f"parallelism.{dimension.key}": _DEGREE for dimension in TORCHTITAN.values()},
    "parallelism.data_parallel_shard_degree": (Interval(ge=-1, le=1 << 20),),
    "parallelism.pipeline_parallel_first_stage_less_layers": _FROM_ZERO,
    "parallelism.pipeline_parallel_last_stage_less_layers": _FROM_ZERO,
    "parallelism.pipeline_parallel_layers_per_stage": _COUNT,
    "lr_scheduler.warmup_steps": _FROM_ZERO,
    "lr_scheduler.total_steps": _COUNT,
    "lr_scheduler.decay_ratio": _SHARE,
    "lr_scheduler.min_lr_factor": _SHARE,
    "optimizer.param_groups": _NOT_EMPTY,
    "loss.num_chunks": _COUNT,
    "metrics.log_freq": _COUNT,
    "checkpoint.load_step": (Ge(-1),),
    "comm.init_timeout_seconds": _SECONDS,
    "comm.train_timeout_seconds": _SECONDS,
    "comm.trace_buf_size": _FROM_ZERO,
    "debug.seed": _FROM_ZERO,
}
"""Ranges that torchtitan does not check itself: a value outside would fail in the middle of a run."""

COMMENT_COLUMN = 60  # where comments start, unless a value reaches beyond
INHERITED = ("base ", "default of ")  # how the source of a value starts that the user did not write


@dataclass(frozen=True)
class Resolved:
    """A configuration, and where each of its values came from."""

    config: Any
    """A `Trainer.Config` of wlb_titan.runtime, which this package does not import."""
    base: Entry
    """The base's name as an entry of its own."""
    entries: tuple[Entry, ...]
    """All values, in the order of the dataclasses' fields."""

    @property
    def provenance(self) -> dict[str, str]:
        """Dotted key -> `base NAME`, `default of CLASS`, `FILE:LINE` or `command line`."""
        return {dotted(entry.path): entry.source for entry in self.entries}

    def to_toml(self, changed_only: bool = False, explain: bool = False) -> str:
        """One TOML file that loads to an equal configuration. With `changed_only` it lacks what is as in the
        base, and does so as long as the base stays the same. With `explain` comments say what keys mean."""
        unchanged = f"base {self.base.value}"
        kept = [entry for entry in self.entries if not (changed_only and entry.source == unchanged)]
        if explain:
            kept = [replace(entry, meaning=meaning_of(self.config, entry.path)) for entry in kept]
        return _document([self.base, *kept])

    def extending(self, file: str) -> str:
        """A TOML file that extends `file` by the values of the command line."""
        first = Entry(("extends",), file, "", to_text(file))
        typed = [entry for entry in (self.base, *self.entries) if entry.source == COMMAND_LINE]
        return _document([first, *(replace(entry, source="", limits=()) for entry in typed)])

    def check(self, rule: Callable[[Any], T]) -> T:
        """Applies a rule to the configuration; a UserError becomes a ConfigError, as `placed` puts it."""
        try:
            return rule(self.config)
        except UserError as error:
            raise ConfigError(self.placed(error)) from error

    def placed(self, error: UserError) -> str:
        """The message of an error after the file, line and value that it speaks of: by its `setting`, or by
        the `key.path: ` that it starts with."""
        key, _, reason = str(error).partition(": ")
        if error.setting:
            ends = (dotted(entry.path) for entry in self.entries)
            key = next((path for path in ends if f".{path}".endswith(f".{error.setting}")), error.setting)
            reason = str(error)
        file = self.base.source
        for entry in self.entries:
            if dotted(entry.path) == key:
                value = f"{key} = {entry.text or shown(entry.value)}"
                if entry.source.startswith(INHERITED):
                    return f"{file}: {value} ({entry.source}): {reason}"
                return f"{entry.source}: {value}: {reason}"
        # The key of a section: show all that was written in it.
        written = [
            f"{dotted(entry.path)} = {entry.text} ({entry.source})"
            for entry in self.entries
            if dotted(entry.path).startswith(f"{key}.") and not entry.source.startswith(INHERITED)
        ]
        message = f"{key}: {error}" if error.setting else str(error)
        return f"{file}: {message}" + (f" You set {', '.join(written)}." if written else "")


def resolve(path: str | Path, overrides: Sequence[str], base_config: Callable[[str], Any]) -> Resolved:
    """Lays command-line overrides over a TOML file, with all that it extends, over its base.

    `base_config` makes a fresh dataclass instance of a base's name; UserError for an unknown one.
    """
    root = read_sources(path, overrides)
    if "base" not in root.children:
        raise ConfigError(
            f'{path}: no base is named; write for example base = "llama3_debug" at the top of this file '
            "or of one that it extends."
        )
    written = string(root.children.pop("base"), "base", "the name of a base configuration")
    name = str(written.value)
    try:
        base = base_config(name)
    except UserError as error:
        raise ConfigError(f"{written.source}: base = {shown(name)}: {error}") from error
    builder = Builder(base, name, LOCKED, LIMITS)
    _make_absolute(root)
    _name_classes(root)
    config = builder.build(root)
    named = Entry(("base",), name, written.source, to_text(name))
    return Resolved(config, named, _with_policy(builder.entries))


def _make_absolute(root: Table) -> None:
    """A local `initial_load_path`, which torchtitan wants from the root on, as all paths are read here: from
    the folder of the command on."""
    match root.children.get("checkpoint"):
        case Table({"initial_load_path": Leaf(str(path)) as leaf} as keys) if "://" not in path:
            if path not in ("", NONE):
                keys["initial_load_path"] = replace(leaf, value=os.path.abspath(os.path.expanduser(path)))


def _name_classes(root: Table) -> None:
    """`wlb.policy` becomes the keys by which the builder chooses the classes of the sections."""
    wlb = root.children.get("wlb")
    if not isinstance(wlb, Table):
        return
    sections = wlb.children
    for name, family in CHOSEN.items():
        section = sections.get(name)
        if isinstance(section, Table) and (choice := section.children.get(family.key)) is not None:
            raise ConfigError(
                f"{choice.source}: wlb.{name}.{family.key}: one key chooses all policies; write wlb.policy = "
                '"PACKING/CONTEXT/ORDER", such as "wlb_lazy/hybrid/best".'
            )
    if "policy" not in sections:
        return
    written = string(sections.pop("policy"), "wlb.policy", "PACKING/CONTEXT/ORDER")
    try:
        policy = Policy.parse(str(written.value))
    except UserError as error:
        raise ConfigError(f"{written.source}: wlb.policy = {shown(written.value)}: {error}.") from error
    for (name, family), value in zip(CHOSEN.items(), policy, strict=True):
        section = sections.setdefault(name, Table({}, written.source, written.layer))
        if isinstance(section, Table):
            section.children[family.key] = replace(written, value=value)


def _with_policy(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The entries with `wlb.policy`, first in its section, for the three classes that it names."""
    keys = [("wlb", name, family.key) for name, family in CHOSEN.items()]
    chosen = [entry for entry in entries if entry.path in keys]
    if not chosen:  # a base without our section
        return tuple(entries)
    name = "/".join(str(entry.value) for entry in chosen)
    policy = Entry(("wlb", "policy"), name, chosen[0].source, to_text(name))
    others = [entry for entry in entries if entry not in chosen]
    first = next(number for number, entry in enumerate(others) if entry.path[0] == "wlb")
    return (*others[:first], policy, *others[first:])


def _document(entries: Iterable[Entry]) -> str:
    """Entries as TOML, one a line, with their sources; those that TOML cannot express become comments."""
    tables: dict[tuple[str | int, ...], list[str]] = {}
    for entry in entries:
        for depth in range(len(entry.path)):  # a table's own values stand before the tables in it
            tables.setdefault(entry.path[:depth], [])
        tables[entry.path[:-1]].append(_line(entry))
    lines = tables.pop(())
    for path, values in tables.items():
        # The number of an element in a new list is not written: each [[list]] starts the next one.
        name = ".".join(key_text(key) for key in path if not isinstance(key, int))
        header = f"[[{name}]]" if isinstance(path[-1], int) else f"[{name}]"
        lines += ["", header, *values] if values else []
    return "\n".join(lines) + "\n"


def _line(entry: Entry) -> str:
    key = entry.path[-1]
    about = "".join(f"# {line}\n" for line in textwrap.wrap(entry.meaning, 108, break_long_words=False))
    if entry.text is None:
        described = type(entry.value).__qualname__
        return f"{about}# {key}: a Python {described}, which only the base can give  # {entry.source}"
    line = f"{key_text(key)} = {entry.text}"
    if not entry.source:
        return about + line
    words = f"; {in_words(entry.limits)}" if entry.limits else ""
    return about + line.ljust(COMMENT_COLUMN) + f"  # {entry.source}{words}"
