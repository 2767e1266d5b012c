"""The user's text, before any type is known: TOML files and command-line overrides as one tree of nodes.

A Leaf is a value of the TOML, a Table a table. Each knows where it was written and in which layer: the files
that others extend, then those, then the command line. A stronger layer's value replaces a weaker one's,
tables are merged key by key.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import tomli

from wlb_titan.errors import ConfigError, refusing, regular_file
from wlb_titan.toml.values import shown

Keys = tuple[str, ...]
COMMAND_LINE = "command line"
DEEPEST = 50  # files that extend each other
TOKENS = re.compile(
    r""""{3}(?:\\.|[^\\])*?"{3,5}|'{3}.*?'{3,5}|"(?:\\.|[^"\\])*"|'[^']*'|\#[^\n]*|[][{}\n]""", re.DOTALL
)
"""Of TOML: strings, comments, brackets and ends of lines. All that brackets or ends of lines can hide in."""
STRONGEST = sys.maxsize
"""The command line's layer; files have 0, 1, ... up to the one that the user named."""


@dataclass(frozen=True)
class Leaf:
    """One value."""

    value: object
    """As tomli gives it."""
    source: str
    """`train.toml:12` or `command line`."""
    layer: int = STRONGEST
    text: str | None = None
    """What was typed on the command line: `5` is also the string "5", should the field be a string."""


@dataclass(frozen=True)
class Table:
    """A table, or an array of tables, whose children then are "0", "1", ..."""

    children: dict[str, Node]
    source: str
    """The strongest layer's."""
    layer: int = STRONGEST
    array: bool = False

    def written(self) -> dict[str, Any]:
        """Dotted key -> value."""
        return {".".join(path): leaf.value for path, leaf in leaves(self)}


Node = Leaf | Table


def read_sources(path: str | Path, overrides: Sequence[str] = ()) -> Table:
    """Read a TOML file, all that it extends, and command-line overrides; the key `extends` is left out."""
    layers = [*_command_line(overrides), *_file_layers(Path(path))]
    root = reduce(_merged, reversed(layers))
    root.children.pop("extends", None)
    return root


def leaves(node: Node, path: Keys = ()) -> Iterator[tuple[Keys, Leaf]]:
    if isinstance(node, Leaf):
        yield path, node
    else:
        for key, child in node.children.items():
            yield from leaves(child, (*path, key))


def _merged(weaker: Any, stronger: Any) -> Any:
    if not (isinstance(weaker, Table) and isinstance(stronger, Table)) or stronger.array:
        return stronger
    children = dict(weaker.children)
    for key, child in stronger.children.items():
        children[key] = _merged(children[key], child) if key in children else child
    return replace(stronger, children=children, array=weaker.array)


def _file_layers(path: Path) -> list[Table]:
    """The file and all that it extends, the strongest first. Of several, the later ones are stronger; a file
    that is reached on two ways has its weaker place."""
    files: dict[Path, Table] = {}  # the weakest first

    def visit(path: Path, place: str, above: list[Path]) -> None:
        if path.resolve() in [link.resolve() for link in above]:
            circle = " -> ".join(str(link) for link in [*above, path])
            raise ConfigError(f"{place}: the files extend each other in a circle: {circle}.")
        if path.resolve() in files:
            return
        if len(above) == DEEPEST:
            raise ConfigError(f"{place}: more than {DEEPEST} files extend each other; put some together.")
        document, table = _read_file(path, place)
        extended = document.get("extends", [])
        source = table(0).children["extends"].source if "extends" in document else ""
        for name in extended if isinstance(extended, list) else [extended]:
            written = f"{source}: extends = {shown(name)}"
            if not isinstance(name, str) or "\0" in name:
                raise ConfigError(f"{written}: expected the path of a TOML file, or a list of such paths.")
            visit(path.parent / name, written, [*above, path])
        files[path.resolve()] = table(len(files))

    visit(path, str(path), [])
    return list(reversed(files.values()))


def string(node: Node, key: str, meaning: str) -> Leaf:
    """The node, if it is a string; otherwise a ConfigError says what the key means."""
    if isinstance(node, Leaf) and isinstance(node.value, str):
        return node
    raise ConfigError(f"{as_written(node, key)}: expected a string, {meaning}.")


def as_written(node: Node, key: str) -> str:
    """Where and what the user wrote: `train.toml:3: training.steps = 5` or `train.toml:2: [training]`."""
    what = f"{key} = {shown(node.value)}" if isinstance(node, Leaf) else f"[{key}]"
    return f"{node.source}: {what}"


def _read_file(path: Path, place: str) -> tuple[dict[str, Any], Callable[[int], Table]]:
    """The document, and as nodes of a layer."""
    with refusing(lambda reason: ConfigError(f"{place}: the file {path} cannot be read: {reason}.")):
        # Some editors begin a file with a byte-order mark.
        text = regular_file(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        try:
            document = tomli.loads(text)
        except tomli.TOMLDecodeError as error:
            raise ConfigError(f"{path}:{error.lineno}: this is not valid TOML: {error}.") from error
    statements = [(line, text.lstrip()[:1] == "[", tomli.loads(text)) for line, text in _statements(text)]
    return document, partial(_table, path, statements)


def _table(path: Path, statements: Iterable[tuple[int, bool, dict[str, Any]]], layer: int) -> Table:
    """A file as nodes. tomli does not tell their lines, so each statement has been parsed by itself; its keys
    go into the table whose header, a statement too, came last."""
    root = Table({}, f"{path}:1", layer)
    here: Any = root
    for line, is_header, document in statements:
        source = f"{path}:{line}"
        if is_header:
            here = root
            while document:
                ((key, inner),) = document.items()
                here = here.children.setdefault(key, Table({}, source, layer, isinstance(inner, list)))
                if isinstance(inner, list):
                    here.children[str(len(here.children))] = Table({}, source, layer)
                if here.array:
                    here = here.children[str(len(here.children) - 1)]
                document = inner if isinstance(inner, dict) else {}
        _fill(here, document, source, layer)
    return root


def _fill(table: Table, values: dict[str, Any], source: str, layer: int) -> None:
    for key, value in values.items():
        inner = table.children.get(key)
        if isinstance(inner, Table):  # of which the key has several parts
            _fill(inner, value, source, layer)
        else:
            table.children[key] = _to_node(value, source, layer)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """The headers and the keys with values of a valid TOML text, each with the line on which it starts."""
    line, start, depth = 1, 0, 0
    for token in TOKENS.finditer(f"{text}\n"):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if token[0] == "\n" and depth == 0:
            statement = text[start : token.end()]
            yield line, statement
            line, start = line + statement.count("\n"), token.end()


def _to_node(value: Any, source: str, layer: int) -> Node:
    array = isinstance(value, list) and len(value) > 0 and all(isinstance(item, dict) for item in value)
    if not array and not isinstance(value, dict):
        return Leaf(value, source, layer)
    inner = enumerate(value) if array else value.items()
    return Table({str(key): _to_node(item, source, layer) for key, item in inner}, source, layer, array)


def _command_line(overrides: Sequence[str]) -> list[Table]:
    """`["--training.steps", "5", "--a.b=true"]` as a tree for each override, the last first."""
    remaining = iter(overrides)
    tables: list[Table] = []
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
                if len(keys) == 1:
                    raise ConfigError(f"{COMMAND_LINE}: {name} is neither an option nor a key with a value.")
                raise ConfigError(
                    f"{COMMAND_LINE}: {name} has no value; write {name} VALUE, for a switch {name} true or "
                    f"{name} false, and for a value that begins with two dashes {name}=VALUE."
                )
        if keys == ["extends"]:
            raise ConfigError(f"{COMMAND_LINE}: {name} {text}: only a TOML file can extend another.")
        node: Any = _parse_word(text)
        for key in reversed(keys):
            node = Table({key: node}, COMMAND_LINE)
        tables.insert(0, node)
    return tables


def _parse_word(text: str) -> Node:
    """A TOML value if the text is one, or else the string itself: `5`, `[1, 2]`, `{lr = 1e-3}`, `llama`."""
    try:
        document = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):  # TOMLDecodeError is a ValueError
        document = {}
    if list(document) != ["value"]:
        return Leaf(text, COMMAND_LINE, text=text)
    node: Node = _to_node(document["value"], COMMAND_LINE, STRONGEST)
    return replace(node, text=text) if isinstance(node, Leaf) else node
