"""Configurations in words, by which equal layers are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torchtitan.config import Configurable

WITHOUT = ("param_init", "sharding_config", "window")
"""Fields by which layers do the same work for a token, but for attention: values and layouts of weights."""


def words_of(node: Any) -> str:
    if isinstance(node, list):
        return f"[{', '.join(map(words_of, node))}]"
    if not isinstance(node, Configurable.Config):
        return repr(node) if isinstance(node, int | float | str | tuple | None) else type(node).__name__
    names = [field.name for field in dataclasses.fields(node) if field.name not in WITHOUT]
    inside = ", ".join(f"{name}={words_of(getattr(node, name))}" for name in names)
    return f"{type(node).__qualname__}({inside})"


def numbers_of(layers: Sequence[Any]) -> tuple[int, ...]:
    """The number of each layer's configuration, in the order in which these appear."""
    seen: dict[str, int] = {}
    return tuple(seen.setdefault(words_of(layer), len(seen)) for layer in layers)
