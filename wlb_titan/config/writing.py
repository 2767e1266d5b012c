"""A list of entries as a TOML document, one line for each value, with a comment saying where it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from wlb_titan.config.build import Entry, dotted
from wlb_titan.config.values import key_text

COMMENT_COLUMN = 60
"""Where comments begin, unless a value reaches beyond."""


def document(entries: Iterable[Entry], ranges: Mapping[str, str] | None = None) -> str:
    """Write entries as TOML. Values that TOML cannot express are left to the base: they become comments.

    Args:
        ranges: dotted key -> the numbers that may stand there, for the comments.
    """
    ranges = ranges or {}
    root: dict[str | int, Any] = {}
    for entry in entries:
        table = root
        for key in entry.path[:-1]:
            table = table.setdefault(key, {})
        words = ranges.get(dotted(entry.path))
        table[entry.path[-1]] = replace(entry, source=f"{entry.source}; {words}") if words else entry
    return "\n".join(_lines(root, "", "")) + "\n"


def _lines(table: dict[str | int, Any], name: str, header: str) -> list[str]:
    """A table's own values, then the tables in it, for only in this order is it TOML."""
    values = [_line(key, entry) for key, entry in table.items() if isinstance(entry, Entry)]
    lines = ["", header, *values] if values and header else values
    for key, child in table.items():
        if isinstance(child, dict):
            # The number of an element in a new list is not written: each [[list]] begins the next element.
            inner = name if isinstance(key, int) else f"{name}.{key_text(key)}".lstrip(".")
            lines += _lines(child, inner, f"[[{inner}]]" if isinstance(key, int) else f"[{inner}]")
    return lines


def _line(key: str | int, entry: Entry) -> str:
    if entry.text is None:
        described = type(entry.value).__qualname__
        return f"# {key}: a Python {described}, which only the base can give  # {entry.source}"
    return f"{key_text(key)} = {entry.text}".ljust(COMMENT_COLUMN) + f"  # {entry.source}"
