"""The user's text, before any type is known: TOML files and command-line overrides as layers of nodes.

A layer is a tree: a Leaf where the TOML has a value, a Table where it has a table. Each node knows where it
was written. Layers are listed weakest first: the file at the end of the `extends` chain, ..., the file that
the user named, the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tomli

from wlb_titan.config.values import shown
from wlb_titan.errors import ConfigError

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Leaf:
    """One value."""

    value: object
    """As tomli gives it."""
    source: str
    """`train.toml:12` or `command line`."""
    text: str | None = None
    """What was typed on the command line: `5` is also the string "5", should the field be a string."""


@dataclass(frozen=True)
class Table:
    """A table, or an array of tables, whose children then are "0", "1", ..."""

    children: dict[str, Node]
    source: str
    array: bool = False


Node = Leaf | Table


@dataclass(frozen=True)
class Sources:
    """All that the user wrote."""

    layers: tuple[Table, ...]
    """Weakest first, without the keys `base` and `extends`."""
    base: Leaf | None
    """The strongest layer's `base`, None if no layer has one."""


def read_sources(path: str | Path, overrides: Sequence[str] = ()) -> Sources:
    """Read a TOML file, all that it extends, and command-line overrides."""
    layers, base = [], None
    for layer in (*reversed(_command_line(overrides)), *_file_chain(Path(path))):
        children = dict(layer.children)
        children.pop("extends", None)
        own_base = children.pop("base", None)
        if base is None and own_base is not None:
            base = _string(own_base, "base", "the name of a base configuration")
        layers.append(replace(layer, children=children))
    return Sources(tuple(reversed(layers)), base)


def leaves(node: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Leaf]]:
    if isinstance(node, Leaf):
        yield path, node
    else:
        for key, child in node.children.items():
            yield from leaves(child, (*path, key))


def written(sources: Sources, key: str) -> object:
    """The strongest layer's value for a dotted key, of whatever type; None if no layer has one."""
    found = None
    for layer in sources.layers:
        for path, leaf in leaves(layer):
            if ".".join(path) == key:
                found = leaf.value
    return found


def _file_chain(path: Path) -> Iterator[Table]:
    """The file, the file it extends, and so on."""
    seen: list[Path] = []
    written: Leaf | None = None  # the `extends` that led here
    while True:
        place = f'{written.source}: extends = "{written.value}"' if written else str(path)
        if path.resolve() in [earlier.resolve() for earlier in seen]:
            circle = " -> ".join(str(link) for link in [*seen, path])
            raise ConfigError(f"{place}: the files extend each other in a circle: {circle}.")
        seen.append(path)
        layer = _read_file(path, place)
        yield layer
        if "extends" not in layer.children:
            return
        written = _string(layer.children["extends"], "extends", "the path of one TOML file")
        path = path.parent / str(written.value)


def _string(node: Node, key: str, meaning: str) -> Leaf:
    if isinstance(node, Leaf) and isinstance(node.value, str):
        return node
    written = f"{key} = {shown(node.value)}" if isinstance(node, Leaf) else f"[{key}]"
    raise ConfigError(f"{node.source}: {written}: expected a string, {meaning}.")


def _read_file(path: Path, place: str) -> Table:
    try:
        text = path.read_bytes().decode("utf-8-sig")  # some editors begin a file with a byte-order mark
    except FileNotFoundError:
        raise ConfigError(f"{place}: there is no file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: the file {path} cannot be read: {error}.") from error
    text = text.replace("\r\n", "\n")
    try:
        document = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: this is not valid TOML: {error}.") from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, arrays nested as deeply
        raise ConfigError(f"{path}: this TOML cannot be read: {error}.") from error
    lines = _line_numbers(text)
    root = _to_node(document, {keys: f"{path}:{line}" for keys, line in lines.items()}, ())
    assert isinstance(root, Table)
    return root


def _line_numbers(text: str) -> dict[tuple[str, ...], int]:
    """On which line each value and table of a valid TOML text starts.

    tomli does not tell, so the text is parsed one line longer each time: what is new when it parses started
    right after the last line at which it did. A text of 150 lines takes some 20 ms.
    """
    lines = text.split("\n")
    numbers: dict[tuple[str, ...], int] = {(): 1}
    begin = 1
    for end in range(1, len(lines) + 1):
        try:
            document = tomli.loads("\n".join(lines[:end]))
        except tomli.TOMLDecodeError:
            continue  # inside a value of several lines
        for keys in _all_keys(document, ()):
            numbers.setdefault(keys, begin)
        begin = end + 1
    return numbers


def _all_keys(value: object, keys: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield keys
    for key, child in _children(value).items():
        yield from _all_keys(child, (*keys, key))


def _children(value: object) -> dict[str, object]:
    """Of a table or an array of tables; any other value has none."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return {str(index): item for index, item in enumerate(value)}
    return {}


def _to_node(value: object, sources: dict[tuple[str, ...], str], keys: tuple[str, ...]) -> Node:
    children = _children(value)
    if not children and not isinstance(value, dict):
        return Leaf(value, sources[keys])
    nodes = {key: _to_node(child, sources, (*keys, key)) for key, child in children.items()}
    return Table(nodes, sources[keys], array=isinstance(value, list))


def _command_line(overrides: Sequence[str]) -> list[Table]:
    """`["--training.steps", "5", "--a.b=true"]` as a layer for each override, the last the strongest."""
    remaining = iter(overrides)
    found = []
    for word in remaining:
        name, equals, text = word.partition("=")
        keys = name.removeprefix("--").split(".")
        if not name.startswith("--") or "" in keys:
            raise ConfigError(
                f"{COMMAND_LINE}: {word!r}: expected --section.key VALUE or --section.key=VALUE."
            )
        if not equals:
            text = next(remaining, "--")
            if text.startswith("--"):
                raise ConfigError(
                    f"{COMMAND_LINE}: {name} has no value; write {name} VALUE, for a switch {name} true or "
                    f"{name} false, and for a value that begins with two dashes {name}=VALUE."
                )
        if keys == ["extends"]:
            raise ConfigError(f"{COMMAND_LINE}: {name} {text}: only a TOML file can extend another.")
        found.append((keys, _parse_word(text)))
    # A section's class is chosen before its keys are set, in whichever order they are given.
    found.sort(key=lambda item: item[0][-1] != "class")
    return [_nest(keys, node) for keys, node in found]


def _nest(keys: Sequence[str], node: Node) -> Table:
    for key in reversed(keys):
        node = Table({key: node}, COMMAND_LINE)
    assert isinstance(node, Table)
    return node


def _parse_word(text: str) -> Node:
    """A TOML value if the text is one, or else the string itself: `5`, `[1, 2]`, `{lr = 1e-3}`, `llama`."""
    try:
        document = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):  # TOMLDecodeError is a ValueError
        document = {}
    if list(document) != ["value"]:
        return Leaf(text, COMMAND_LINE, text)
    everywhere = dict.fromkeys(_all_keys(document, ()), COMMAND_LINE)
    node = _to_node(document["value"], everywhere, ("value",))
    return replace(node, text=text) if isinstance(node, Leaf) else node
