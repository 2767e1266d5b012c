"""Misspelt keys, found before torchtitan is imported, which takes longer than to read the answer.

For the bases that come with wlb_titan the keys of torchtitan's sections lie in known_keys.json, written by
`python -m wlb_titan.runtime.checks.known_keys`; a test compares them with the real ones.
[wlb.*] is read off our own dataclasses. What is found here, `load` would find too, in the same words; what is
not looked at here (other bases, sections of a chosen class, lists, values of torchtitan's) it finds later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from wlb_titan.config.build import CLASS, Builder, Rejection, dotted, no_such_key
from wlb_titan.config.classes import short_name
from wlb_titan.config.settings import WlbSettings
from wlb_titan.config.sources import Table, read_sources

FILE_NAME = "known_keys.json"
OURS = "wlb"


@dataclass(frozen=True)
class Keys:
    """The keys of a configuration.

    Attributes:
        sections: by dotted path ("" is the root) a section's class and its keys.
        values: dotted paths of all values, for "Did you mean ...?".
    """

    sections: Mapping[str, tuple[str, list[str]]]
    values: list[str]

    def to_json(self) -> dict[str, Any]:
        return {"sections": self.sections, "values": self.values}


def keys_of(config: Any, locked: Mapping[str, str]) -> Keys:
    """Reads the keys off a dataclass instance.

    Args:
        config: the instance.
        locked: fields that the user cannot set, by dotted path; what is below them is left out.
    """
    sections: dict[str, tuple[str, list[str]]] = {}

    def visit(section: Any, path: tuple[str, ...]) -> None:
        names = [one.name for one in fields(section) if one.init]
        sections[dotted(path)] = (short_name(type(section)), names)
        for name in names:
            if is_dataclass(getattr(section, name)) and dotted((*path, name)) not in locked:
                visit(getattr(section, name), (*path, name))

    visit(config, ())
    builder = Builder(config, "", locked)
    builder.build([])
    return Keys(sections, [dotted(entry.path) for entry in builder.entries])


def without_ours(keys: Keys) -> Keys:
    """All but what is in [wlb] and below, which the file need not know."""
    sections = {path: section for path, section in keys.sections.items() if path.split(".")[0] != OURS}
    return Keys(sections, [path for path in keys.values if path.split(".")[0] != OURS])


def refuse_unknown_keys(path: str | Path, overrides: Sequence[str] = ()) -> None:
    """Looks for keys that do not exist, and for values in [wlb.*] that cannot stand there.

    Args:
        path: the TOML file.
        overrides: command-line words.

    Raises:
        ConfigError: there is one, or the files cannot be read.
    """
    sources = read_sources(path, overrides)
    if sources.base is None:
        return
    stored = json.loads(resources.files(__package__).joinpath(FILE_NAME).read_text())
    if sources.base.value not in stored["bases"]:
        return
    ours = Builder(_Ours(), "", {}, elsewhere=stored["values"])
    ours.build([])
    values = [*stored["values"], *(dotted(entry.path) for entry in ours.entries)]
    _visit(sources.layers, (), Keys(stored["sections"], values))
    written = [{OURS: layer.children[OURS]} for layer in sources.layers if OURS in layer.children]
    with suppress(Rejection):  # of values that go together; `load` says which
        ours.build([Table(children, "") for children in written])


@dataclass
class _Ours:
    """The root of a configuration that has nothing but [wlb]."""

    wlb: WlbSettings = field(default_factory=WlbSettings)


def _visit(tables: Sequence[Table], path: tuple[str, ...], keys: Keys) -> None:
    """Checks a section, given as the tables of all layers, and those below it."""
    if dotted(path) not in keys.sections or (path and any(CLASS in table.children for table in tables)):
        return
    owner, names = keys.sections[dotted(path)]
    for table in tables:
        for key, node in table.children.items():
            if key not in names:
                raise no_such_key(node, (*path, key), owner, names, keys.values)
    for name in names:
        below = [table.children[name] for table in tables if name in table.children]
        _visit([node for node in below if isinstance(node, Table) and not node.array], (*path, name), keys)
