"""From a TOML file and command-line overrides to a configuration over a base."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from wlb_titan.config.blame import blame
from wlb_titan.config.build import Builder, Entry, Rejection, dotted
from wlb_titan.config.sources import Leaf, Table, leaves, read_sources
from wlb_titan.config.values import shown, to_text
from wlb_titan.config.writing import document
from wlb_titan.errors import ConfigError, UserError

T = TypeVar("T")

LOCKED = {
    "model_spec": "the model cannot be set from TOML, it comes with the base; choose another `base` instead.",
    "hf_assets_path": "this has no effect, the tokenizer is that of the corpus; set wlb.corpus.path instead.",
    "dataloader": "this has no effect, documents come from the corpus; set wlb.corpus.path instead.",
    "parallelism.context_parallel_load_balancer": "this has no effect, how tokens are spread over "
    "context-parallel ranks is wlb.sharding.policy.",
    "parallelism.context_parallel_ptrr_mask_key": "this has no effect, how tokens are spread over "
    "context-parallel ranks is wlb.sharding.policy.",
}
"""What the user cannot set, with the reason."""

IMPLIED = {("checkpoint", "last_save_in_hf"): ("checkpoint", "last_save_model_only")}
"""What a key that is set to true sets to true besides, unless the same file or a stronger one sets it too:
Hugging Face's format has no place for an optimizer."""

INHERITED = ("base ", "default of ")
"""How the source of a value begins that the user did not write."""


@dataclass(frozen=True)
class Resolved:
    """A configuration, and where each of its values came from."""

    config: Any
    """A `Trainer.Config` of wlb_titan.runtime, which this package does not import."""
    base: Entry
    """The base's name as an entry of its own."""
    entries: tuple[Entry, ...]
    """All values, in the order of the dataclasses' fields."""
    ranges: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> which numbers it may hold, in words."""

    @property
    def provenance(self) -> dict[str, str]:
        """Dotted key -> `base NAME`, `default of CLASS`, `FILE:LINE` or `command line`."""
        return {dotted(entry.path): entry.source for entry in self.entries}

    def to_toml(self, changed_only: bool = False) -> str:
        """Write the configuration as one self-contained TOML file that loads to an equal configuration.

        Args:
            changed_only: leave out what is as in the base. Loading that gives an equal configuration too,
                as long as the base stays the same.
        """
        unchanged = f"base {self.base.value}"
        kept = [entry for entry in self.entries if not (changed_only and entry.source == unchanged)]
        return document([self.base, *kept], self.ranges)

    def check(self, rule: Callable[[Any], T]) -> T:
        """Apply a rule to the whole configuration, and return what it gives.

        Args:
            rule: takes the configuration; raises UserError if it is broken, as `key.path: reason` or with a
                `setting`.

        Raises:
            ConfigError: the rule's error, with the values it speaks of and where they were written.
        """
        try:
            return rule(self.config)
        except UserError as error:
            raise ConfigError(self.placed(error)) from error

    def placed(self, error: UserError) -> str:
        """An error's message after the file, line and value that it speaks of.

        Args:
            error: one with a `setting`, or whose message begins with `key.path: `.
        """
        key, _, reason = str(error).partition(": ")
        if error.setting:
            ends = (dotted(entry.path) for entry in self.entries)
            wanted = f".{error.setting}"
            key = next((path for path in ends if f".{path}".endswith(wanted)), error.setting)
            reason = str(error)
        file = self.base.source
        for entry in self.entries:
            if dotted(entry.path) == key:
                value = f"{key} = {entry.text or shown(entry.value)}"
                if entry.source.startswith(INHERITED):
                    return f"{file}: {value} ({entry.source}): {reason}"
                return f"{entry.source}: {value}: {reason}"
        # The key of a section: all that was written in it is of interest.
        written = [
            f"{dotted(entry.path)} = {entry.text} ({entry.source})"
            for entry in self.entries
            if dotted(entry.path).startswith(f"{key}.") and not entry.source.startswith(INHERITED)
        ]
        message = f"{key}: {error}" if error.setting else str(error)
        return f"{file}: {message}" + (f" Written are {', '.join(written)}." if written else "")


def resolve(path: str | Path, overrides: Sequence[str], base_config: Callable[[str], Any]) -> Resolved:
    """Lays command-line overrides over a TOML file, with all that it extends, over its base.

    Args:
        base_config: makes a fresh dataclass instance of a base's name; raises UserError for an unknown one.

    Raises:
        ConfigError: the user's mistake, with its place.
    """
    sources = read_sources(path, overrides)
    if sources.base is None:
        raise ConfigError(
            f'{path}: no base is named; write for example base = "llama3_debug" at the top of this file '
            "or of one that it extends."
        )
    name = str(sources.base.value)
    try:
        base = base_config(name)
    except UserError as error:
        raise ConfigError(f"{sources.base.source}: base = {shown(name)}: {error}") from error
    builder = Builder(base, name, LOCKED)
    layers = tuple(_implied(sources.layers))
    try:
        config = builder.build(layers)
    except Rejection as rejection:
        raise blame(rejection, builder, layers) from rejection
    named = Entry(("base",), name, sources.base.source, to_text(name))
    return Resolved(config, named, tuple(builder.entries))


def _implied(layers: Sequence[Table]) -> Iterator[Table]:
    """The layers, and below each one with what `IMPLIED` has for what it sets."""
    for layer in layers:
        written = dict(leaves(layer))
        for path, (section, key) in IMPLIED.items():
            leaf = written.get(path)
            if leaf is not None and leaf.value in (True, "true"):
                implied = Leaf(True, f"{leaf.source} by {dotted(path)}")
                yield Table({section: Table({key: implied}, leaf.source)}, leaf.source)
        yield layer
