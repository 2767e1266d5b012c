"""What the papers state (facts.toml), and why our figures are others (why.toml)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("facts.toml")
USES = ("setting", "calibrates", "compared", "algorithm", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One statement; the fields are the keys of the file."""

    key: str
    text: str
    source: str
    section: str
    use: str
    value: float | None = None
    note: str = ""


def load() -> tuple[dict[str, Fact], list[dict[str, str]], dict[str, str]]:
    """Facts by their key; what is not stated, with its range; and the sources' names."""
    record = tomllib.loads(FILE.read_text(encoding="utf-8"))
    facts = [Fact(**entry) for entry in record["fact"]]
    for fact in facts:
        assert fact.use in USES, f"{FILE.name}: {fact.key} is used as {fact.use!r}"
        assert fact.source in record["sources"], f"{FILE.name}: {fact.key} is from {fact.source!r}"
    assert len({fact.key for fact in facts}) == len(facts), f"{FILE.name}: a key is there twice"
    return {fact.key: fact for fact in facts}, record["unstated"], record["sources"]


def reasons() -> dict[str, str]:
    """By section of docs/reproduction.md."""
    return tomllib.loads(FILE.with_name("why.toml").read_text(encoding="utf-8"))
