"""The user's text, before any type is known: TOML files and command-line overrides as one tree of nodes.

A Leaf is a value of the TOML, a Table a table. Each knows where it was written and in which layer: the files
that others extend, then those, then the command line. A stronger layer's value replaces a weaker one's,
tables are merged key by key.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import tomli

from wlb_titan.errors import ConfigError, reading, regular
from wlb_titan.toml.values import shown

Keys = tuple[str, ...]
COMMAND_LINE = "command line"
DEEPEST = 50  # files that extend each other
TOKENS = re.compile(
    r""""{3}(?:\\.|[^\\])*?"{3,5}|'{3}.*?'{3,5}|"(?:\\.|[^"\\])*"|'[^']*'|\#[^\n]*|[][{}\n]""", re.DOTALL
)
"""Of TOML: strings, comments, brackets and ends of lines. All that brackets or ends of lines can hide in."""
STRONGEST = 1
"""The command line's layer; the file that the user named is 0, the last one that it extends -1, and so on."""


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
    files: dict[Path, tuple[dict[str, Any], Callable[[Keys], str]]] = {}  # the weakest first

    def visit(path: Path, place: str, above: list[Path]) -> None:
        if path.resolve() in [link.resolve() for link in above]:
            circle = " -> ".join(str(link) for link in [*above, path])
            raise ConfigError(f"{place}: the files extend each other in a circle: {circle}.")
        if path.resolve() in files:
            return
        if len(above) == DEEPEST:
            raise ConfigError(f"{place}: more than {DEEPEST} files extend each other; put some together.")
        document, source = _read_file(path, place)
        extended = document.get("extends", [])
        for name in extended if isinstance(extended, list) else [extended]:
            written = f"{source(('extends',))}: extends = {shown(name)}"
            if not isinstance(name, str) or "\0" in name:
                raise ConfigError(f"{written}: expected the path of a TOML file, or a list of such paths.")
            visit(path.parent / name, written, [*above, path])
        files[path.resolve()] = document, source

    visit(path, str(path), [])
    return [_to_node(document, source, -n) for n, (document, source) in enumerate(reversed(files.values()))]


def string(node: Node, key: str, meaning: str) -> Leaf:
    """The node, if it is a string; otherwise a ConfigError says what the key means."""
    if isinstance(node, Leaf) and isinstance(node.value, str):
        return node
    written = f"{key} = {shown(node.value)}" if isinstance(node, Leaf) else f"[{key}]"
    raise ConfigError(f"{node.source}: {written}: expected a string, {meaning}.")


def _read_file(path: Path, place: str) -> tuple[dict[str, Any], Callable[[Keys], str]]:
    """The document, and where each of its keys stands."""
    with reading(lambda reason: ConfigError(f"{place}: the file {path} cannot be read: {reason}.")):
        # Some editors begin a file with a byte-order mark.
        text = regular(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        try:
            document = tomli.loads(text)
        except tomli.TOMLDecodeError as error:
            raise ConfigError(f"{path}:{error.lineno}: this is not valid TOML: {error}.") from error
    lines = _line_numbers(text)
    return document, lambda keys: f"{path}:{lines[keys]}"


def _line_numbers(text: str) -> dict[Keys, int]:
    """On which line each value and table of a valid TOML text starts. tomli does not tell, so each statement
    is parsed by itself; its keys stand below the last header's."""
    numbers: dict[Keys, int] = {(): 1}
    tables: Keys = ()
    lengths: Counter[Keys] = Counter()  # of arrays of tables, so far
    for line, statement in _statements(text):
        document: Any = tomli.loads(statement)
        if statement.lstrip().startswith("["):
            tables = ()
            while document:
                ((key, document),) = document.items()
                numbers.setdefault(tables := (*tables, key), line)
                if isinstance(document, list):
                    lengths[tables] += 1
                    document = {}
                if tables in lengths:
                    numbers.setdefault(tables := (*tables, str(lengths[tables] - 1)), line)
        for keys in _all_keys(document, tables):
            numbers.setdefault(keys, line)
    return numbers


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """The headers and the keys with values of a valid TOML text, each with the line on which it starts."""
    line, start, depth = 1, 0, 0
    for token in TOKENS.finditer(f"{text}\n"):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if token[0] == "\n" and depth == 0:
            statement = text[start : token.end()]
            yield line, statement
            line, start = line + statement.count("\n"), token.end()


def _all_keys(value: object, keys: Keys) -> Iterator[Keys]:
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


def _to_node(value: object, source: Callable[[Keys], str], layer: int, keys: Keys = ()) -> Any:
    children = _children(value)
    if not children and not isinstance(value, dict):
        return Leaf(value, source(keys), layer)
    nodes = {key: _to_node(child, source, layer, (*keys, key)) for key, child in children.items()}
    return Table(nodes, source(keys), layer, array=isinstance(value, list))


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
    node: Node = _to_node(document["value"], lambda keys: COMMAND_LINE, STRONGEST)
    return replace(node, text=text) if isinstance(node, Leaf) else node
