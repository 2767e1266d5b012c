"""Lay what the user wrote over a base configuration, guided by the dataclasses' own type hints.

The base, a tree of dataclasses, is never changed. The builder goes down it beside the tree of what is
written, and puts every dataclass together again with `dataclasses.replace` on the way up, so that each
`__post_init__` checks the new values. It also lists every value with where it came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, is_dataclass
from typing import Annotated, Any, get_args, get_origin

from annotated_types import BaseMetadata

from wlb_titan.errors import ConfigError, UserError
from wlb_titan.plugins import PluginConfig, configuration, full_name, short_name
from wlb_titan.toml.sources import COMMAND_LINE, Leaf, Node, Table, as_written, leaves, string
from wlb_titan.toml.values import (
    Mismatch,
    arms,
    bare,
    convert,
    dataclass_arms,
    expressed,
    limits_of,
    shown,
    to_text,
)

KeyPath = tuple[str | int, ...]
"""Keys from the root down. A place in a list is a string where the base's list is kept ("0"), a number where
the user gave a whole new list (0)."""

CLASS = "class"  # the key by which a section chooses its class; for a plug-in, its family names the key

MOST_LISTED = 8  # values that an error about a whole section shows


@dataclass(frozen=True)
class Entry:
    """One value of a built configuration."""

    path: KeyPath
    value: object
    source: str
    """`base llama3_debug`, `default of FullAC`, `train.toml:12` or `command line`."""
    text: str | None
    """As TOML; None if TOML cannot express it, so that only a base can give it."""
    limits: tuple[BaseMetadata, ...] = ()  # of the numbers that may stand there
    meaning: str = ""  # a comment above it


def dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(key) for key in path)


@dataclass
class Builder:
    """Builds one configuration."""

    base: object
    base_name: str
    locked: Mapping[str, str]
    """Dotted path of a field that the user cannot set -> the reason."""
    limits: Mapping[str, tuple[object, ...]]
    """Dotted path of a field in a class that is not ours -> the limits of its values."""
    entries: list[Entry] = field(default_factory=list)  # all values in order, once `build` is through

    def build(self, written: Table | None) -> Any:
        """The base with what is written over it."""
        return self._section(self.base, type(self.base), written, (), f"base {self.base_name}")

    # Each method below returns the new value of the field at `path`, of type `hint`. So far the field holds
    # `current` (MISSING: nothing), which came from `origin`; `node` is what is written, if anything is.

    def _value(self, current: object, hint: object, node: Node | None, path: KeyPath, origin: str) -> Any:
        if dataclass_arms(hint) or is_dataclass(current):
            return self._section(current, hint, node, path, origin)
        for arm in map(bare, arms(hint)):
            arguments = get_args(arm)
            if get_origin(arm) is list and dataclass_arms(arguments[0]):
                return self._list(current, hint, arguments[0], node, path, origin)
            if arm is dict or get_origin(arm) is dict:
                return self._dict(current, hint, arguments[1] if arguments else Any, node, path, origin)
        if hint is Any and (isinstance(current, dict) or _is_table(node)):
            return self._dict(current, hint, Any, node, path, origin)
        return self._leaf(current, hint, node, path, origin)

    def _leaf(self, current: object, hint: object, node: Node | None, path: KeyPath, origin: str) -> Any:
        if node is not None:
            current, origin = _converted(node, hint, current, path), node.source
        self.entries.append(Entry(path, current, origin, expressed(current, hint), limits_of(hint)))
        return current

    def _section(self, current: object, hint: object, node: Node | None, path: KeyPath, origin: str) -> Any:
        """A dataclass. If another class is named, it starts from that class's own defaults, in a family of
        plug-ins with the values that both have."""
        start: Any = current if is_dataclass(current) else None
        if isinstance(node, Leaf) or (node is None and start is None):
            return self._leaf(current, hint, node, path, origin)
        cls: Any = type(current) if start is not None else None
        chosen_by = origin if cls and dataclass_arms(hint) != (cls,) else None
        if node is not None:
            wanted, choice = _wanted_class(cls, hint, node, path)
            if choice is not None:
                node, chosen_by = _suiting(node, wanted, choice), choice.source
            if wanted is not cls:
                if isinstance(start, PluginConfig) and issubclass(wanted, PluginConfig):
                    start = start.named(wanted.owner_name())
                else:
                    start = None
                cls, origin = wanted, f"default of {short_name(wanted)}"
        if issubclass(cls, PluginConfig):
            name = cls.owner_name()
            self.entries.append(Entry((*path, cls.family.key), name, chosen_by or origin, to_text(name)))
        elif chosen_by:  # the class is not simply the one that the field declares
            name = full_name(cls)
            self.entries.append(Entry((*path, CLASS), name, chosen_by, to_text(name)))
        return self._instance(cls, start, node, path, origin)

    def _instance(self, cls: type, start: Any, table: Table | None, path: KeyPath, origin: str) -> Any:
        """`start` with what the table says, or a new `cls` if `start` is None."""
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        written = table.children if table is not None else {}
        for key, child in written.items():
            if key not in fields:
                raise self._no_such_key(child, (*path, key), cls, list(fields))
        values: dict[str, Any] = {}
        for name, setting in fields.items():
            here, node = (*path, name), written.get(name)
            if dotted(here) in self.locked:
                if node is not None:
                    raise ConfigError(f"{as_written(node, dotted(here))}: {self.locked[dotted(here)]}")
                continue
            current = default_of(setting) if start is None else getattr(start, name)
            if current is MISSING and node is None and table is not None:
                raise ConfigError(f"{table.source}: [{dotted(path)}]: the required key {name!r} is missing.")
            hint, limits = _hints(cls)[name], self.limits.get(dotted(here))
            hint = Annotated[hint, *limits] if limits else hint
            values[name] = self._value(current, hint, node, here, origin)
        if table is None:
            return start
        try:
            return cls(**values) if start is None else dataclasses.replace(start, **values)
        except Exception as error:  # whatever a __post_init__ raises means that the values will not do
            raise _refused(error, cls, table, path) from error

    def _list(
        self, current: Any, hint: object, element: object, node: Node | None, path: KeyPath, origin: str
    ) -> Any:
        """A list of dataclasses: `[[list]]` replaces it, `[list.0]` changes one of its elements."""
        if isinstance(node, Leaf) or (node is None and not current):
            return self._leaf(current, hint, node, path, origin)
        written = node.children if node is not None else {}
        new = node is not None and node.array
        items = [MISSING] * len(written) if new else current or []
        for key, child in written.items():
            if key not in map(str, range(len(items))):
                raise ConfigError(
                    f"{child.source}: {dotted((*path, key))}: the list {dotted(path)} has {len(items)} "
                    f"element(s), counted from 0; [[{dotted(path)}]] gives a whole new list."
                )
        built = [
            self._value(item, element, written.get(str(index)), (*path, index if new else str(index)), origin)
            for index, item in enumerate(items)
        ]
        return current if node is None else built

    def _dict(
        self, current: Any, hint: object, element: object, node: Node | None, path: KeyPath, origin: str
    ) -> Any:
        """A dict: tables add keys and change values."""
        if not _is_table(node) and (node is not None or not isinstance(current, dict)):
            return self._leaf(current, hint, node, path, origin)
        before = current if isinstance(current, dict) else {}
        written = node.children if isinstance(node, Table) else {}
        if not before and not written:
            self.entries.append(Entry(path, {}, node.source if node is not None else origin, "{}"))
        after = {
            key: self._value(before.get(key, MISSING), element, written.get(key), (*path, key), origin)
            for key in {**before, **written}
        }
        return current if node is None else after

    def _no_such_key(self, node: Node, path: KeyPath, cls: type, names: list[str]) -> ConfigError:
        key = str(path[-1])
        if issubclass(cls, PluginConfig) and (others := cls.family.having(key)):
            hint = (
                f" The {cls.family.kind} {shown(cls.owner_name())} does not have it, but {', '.join(others)}."
            )
        else:
            base = Builder(self.base, self.base_name, self.locked, self.limits)
            base.build(None)
            namesakes = [dotted(entry.path) for entry in base.entries if entry.path[-1] == key]
            close = [dotted((*path[:-1], name)) for name in difflib.get_close_matches(key, names, n=1)]
            nearest = [*close, *namesakes][:1]
            hint = f" Did you mean {nearest[0]}?" if nearest else ""
        if len(path) == 1 and node.source == COMMAND_LINE:
            hint += " --help lists the command's own options."
        if len(names) <= 12:
            hint += f" {short_name(cls)} has {', '.join(names) or 'no keys'}."
        return ConfigError(f"{as_written(node, dotted(path))}: there is no such key.{hint}")


def _refused(error: Exception, cls: type, table: Table, path: KeyPath) -> ConfigError:
    """The error for values that a `__post_init__` refuses, with those that its message names, or else all."""
    said = " ".join(str(error).split()).rstrip(".") or repr(error)
    reason = f"{short_name(cls)} rejects this: {said}."
    written = {(*path, *keys): leaf for keys, leaf in leaves(table)}
    named = {
        keys: leaf for keys, leaf in written.items() if re.search(rf"\b{re.escape(str(keys[-1]))}\b", said)
    }
    relevant = (named or written).items()
    told = [(f"{dotted(keys)} = {shown(leaf.value)}", leaf.source) for keys, leaf in relevant]
    if len(told) == 1:
        ((value, source),) = told
        return ConfigError(f"{source}: {value}: {reason}")
    place = f"{table.source}: [{dotted(path)}]" if path else table.source
    listed = ", ".join(f"{value} ({source})" for value, source in told[:MOST_LISTED])
    return ConfigError(f"{place}: {reason} You set {listed}{', ...' * (len(told) > MOST_LISTED)}.")


def _wanted_class(cls: type | None, hint: object, node: Table, path: KeyPath) -> tuple[type, Leaf | None]:
    """The class that a table asks for, and where; (`cls`, None) if it leaves the class as it is."""
    if node.array:
        raise ConfigError(
            f"{node.source}: [[{dotted(path)}]]: an array, but a single table is expected here."
        )
    allowed = dataclass_arms(hint) or (typing.cast(type, cls),)
    key = allowed[0].family.key if issubclass(allowed[0], PluginConfig) else CLASS
    choice = node.children.get(key) if path else None
    if choice is None:
        if cls is not None or len(allowed) == 1:
            return cls or allowed[0], None
        names = " or ".join(f'"{short_name(option)}"' for option in allowed)
        raise ConfigError(f"{node.source}: [{dotted(path)}]: which kind is meant? Add class = {names}.")
    place = dotted((*path, key))
    leaf = string(choice, place, "the name of a class")
    name = str(leaf.value)
    try:
        if issubclass(allowed[0], PluginConfig):
            return allowed[0].family.find(name).Config, leaf
        return configuration(name, allowed), leaf
    except UserError as error:
        raise ConfigError(f"{as_written(leaf, place)}: {error}.") from error


def _suiting(table: Table, cls: type, choice: Leaf) -> Table:
    """A table without the choice, and without what weaker layers set for another class."""
    names = {field.name for field in dataclasses.fields(cls)}
    others = {key: child for key, child in table.children.items() if child is not choice}
    kept = {k: child for k, child in others.items() if k in names or child.layer >= choice.layer}
    return dataclasses.replace(table, children=kept)


def _converted(node: Node, hint: object, current: object, path: KeyPath) -> Any:
    """The value of a leaf (or of an array of tables, for a field that holds a list of dicts)."""
    value = _plain(node)
    # On the command line 5 may also be the string "5".
    readings = [value, node.text] if isinstance(node, Leaf) and node.text is not None else [value]
    reasons = []
    for reading in readings:
        try:
            return convert(reading, hint, current)
        except Mismatch as mismatch:
            reasons.append(mismatch)
    raise ConfigError(f"{node.source}: {dotted(path)} = {shown(value)}: {reasons[0]}.")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _is_table(node: Node | None) -> bool:
    return isinstance(node, Table) and not node.array


def _plain(node: Node) -> Any:
    if isinstance(node, Leaf):
        return node.value
    if node.array:
        return [_plain(child) for child in node.children.values()]
    return {key: _plain(child) for key, child in node.children.items()}
