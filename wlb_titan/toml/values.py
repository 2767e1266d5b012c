"""Plain TOML values and the type hints of dataclass fields: conversion one way, TOML text the other way.

TOML has no null: the string "none" stands for None wherever the type allows None.

A hint may say which numbers are meant, as `Annotated[int, Ge(1)]` does, in the words of the library
`annotated_types`: Ge, Gt, Le, Lt, Interval, and MinLen for a string or list. They hold for each element in
`list[Annotated[int, Ge(2)]]`. Two rules need no annotation: a float is a finite number, and an integer has 64
bits.
"""

from __future__ import annotations

import json
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from itertools import chain
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli
from annotated_types import BaseMetadata, Ge, GroupedMetadata, Gt, Le, Lt, MinLen

NONE = "none"
LARGEST_INTEGER = 2**63 - 1

LIMITS: dict[type, tuple[str, Callable[[Any, Any], bool], str]] = {
    Ge: ("ge", operator.ge, "at least {}"),
    Gt: ("gt", operator.gt, "above {}"),
    Le: ("le", operator.le, "at most {}"),
    Lt: ("lt", operator.lt, "below {}"),
    MinLen: ("min_length", lambda value, least: len(value) >= least, "not empty"),
}
"""Kind of limit -> where its bound stands, whether a value keeps to it, and its words."""


class Mismatch(Exception):
    """A value not of the type, or not in the range, that a hint asks for."""


def bare(hint: object) -> object:
    """A hint without what `Annotated` says of the whole."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def arms(hint: object) -> tuple[object, ...]:
    """The alternatives of a union, without None; `(hint,)` for anything else."""
    hint = bare(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(arm for arm in get_args(hint) if bare(arm) is not types.NoneType)
    return (hint,)


def allows_none(hint: object) -> bool:
    return any(bare(arm) is types.NoneType for arm in (hint, *get_args(bare(hint))))


def dataclass_arms(hint: object) -> tuple[type, ...]:
    """The dataclasses among a hint's alternatives: `A.Config | B.Config | None` -> `(A.Config, B.Config)`."""
    return tuple(arm for arm in map(bare, arms(hint)) if isinstance(arm, type) and is_dataclass(arm))


def limits_of(hint: object) -> tuple[BaseMetadata, ...]:
    """What `Annotated` says anywhere in a hint: of the alternatives of a union, and of a list's elements."""
    found: list[BaseMetadata] = []
    if get_origin(hint) is Annotated:
        found += _limits(hint)
        hint = bare(hint)
    for argument in get_args(hint):
        found += limits_of(argument)
    return tuple(found)


def convert(value: object, hint: object, guide: object = None) -> Any:
    """What a field of type `hint` holds for a value that tomli read; raises Mismatch if it is unfit.

    An integer becomes a float where only a float is asked for, an array a tuple where a tuple is asked for.
    Where anything may stand (Any), an array becomes a tuple if `guide`, the value it replaces, is one.
    """
    if value == NONE and allows_none(hint):
        return None
    if get_origin(hint) is Annotated:
        return _convert_in_range(value, hint, guide)
    if (alternatives := arms(hint)) != (hint,):
        return _convert_to_union(value, alternatives, guide)
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if hint is Any:
        if isinstance(value, str | int | float | list | dict) and is_sound(value):
            return tuple(value) if isinstance(value, list) and isinstance(guide, tuple) else value
    elif origin is Literal:
        for option in arguments:
            if type(option) is type(value) and option == value:
                return option
    elif hint is float:
        if type(value) in (int, float) and is_sound(value):
            return float(typing.cast(float, value))
    elif hint in (bool, int, str):
        if type(value) is hint and is_sound(value):
            return value
    elif origin is list and isinstance(value, list):
        return [convert(item, arguments[0]) for item in value]
    elif origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        return tuple(map(convert, value, arguments))
    elif origin is dict and isinstance(value, dict):
        return {key: convert(item, arguments[1]) for key, item in value.items()}
    raise Mismatch


def _convert_in_range(value: object, hint: object, guide: object) -> Any:
    result = convert(value, bare(hint), guide)
    for limit in _limits(hint):
        bound, holds, _ = LIMITS[type(limit)]
        if not holds(result, getattr(limit, bound)):
            raise Mismatch
    return result


def _convert_to_union(value: object, alternatives: tuple[object, ...], guide: object) -> Any:
    results = []
    for alternative in alternatives:
        try:
            results.append(convert(value, alternative, guide))
        except Mismatch:
            continue
    if not results:
        raise Mismatch
    # 1 stays an integer in `float | int`.
    return next((result for result in results if type(result) is type(value)), results[0])


def is_sound(value: object) -> bool:
    """Whether all numbers are finite and of at most 64 bits."""
    if isinstance(value, int):
        return abs(value) <= LARGEST_INTEGER
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(is_sound, value.values()))
    return not isinstance(value, list) or all(map(is_sound, value))


def _limits(hint: object) -> list[BaseMetadata]:
    """What `Annotated` says of the whole of a hint."""
    metadata = getattr(hint, "__metadata__", ())
    flat = chain.from_iterable(one if isinstance(one, GroupedMetadata) else [one] for one in metadata)
    return [one for one in flat if type(one) in LIMITS]


def describe(hint: object) -> str:
    """Say in words what may stand in a field: `Literal["a", "b"] | None` -> `one of "a", "b" or "none"`."""
    words = list(dict.fromkeys(_describe_one(arm) for arm in arms(hint)))
    if limits := _limits(hint):
        words[-1] += f", {in_words(limits)}"
    if allows_none(hint):
        words.append(f'"{NONE}"')
    return " or ".join(words)


def in_words(limits: Iterable[BaseMetadata]) -> str:
    """`(Gt(0), Le(1))` -> `above 0 and at most 1`."""
    kinds = ((limit, *LIMITS[type(limit)]) for limit in limits)
    return " and ".join(pattern.format(getattr(limit, bound)) for limit, bound, _, pattern in kinds)


def _describe_one(hint: object) -> str:
    if get_origin(hint) is Annotated:
        return describe(hint)
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    simple = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Any: "a value"}
    if isinstance(hint, typing.Hashable) and hint in simple:
        return simple[hint]
    if origin is Literal:
        return "one of " + ", ".join(to_text(option) for option in arguments)
    if origin is list:
        return f"an array (each element {describe(arguments[0])})"
    if origin is tuple:
        return f"an array of {len(arguments)} values"
    if origin is dict or (isinstance(hint, type) and is_dataclass(hint)):
        return "a table"
    return "a Python object that only a base can give"


def to_text(value: object) -> str:
    """A value as TOML, on one line; raises Mismatch where TOML has none."""
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if type(value) in (int, float):
        return repr(value)  # TOML spells inf, nan and 1e-08 as Python does
    if type(value) is str:
        return _quote(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_text(item) for item in value) + "]"
    if isinstance(value, dict):
        pairs = [f"{key_text(key)} = {to_text(item)}" for key, item in value.items()]
        return "{" + ", ".join(pairs) + "}"
    raise Mismatch


def shown(value: object, limit: int = 80) -> str:
    """A value for a message: as TOML where possible, cut where it is long."""
    try:
        text = to_text(value)
    except Mismatch:
        text = str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def key_text(key: object) -> str:
    """One part of a key as TOML, quoted if need be; raises Mismatch unless it is a string."""
    if not isinstance(key, str):
        raise Mismatch
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quote(key)


def _quote(text: str) -> str:
    # JSON's escapes are TOML's, but TOML also wants DEL escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def expressed(value: object, hint: object) -> str | None:
    """The value as TOML if a field of type `hint` can read it back, else None."""
    try:
        text = to_text(value)
        same = convert(tomli.loads(f"value = {text}")["value"], hint, value) == value
    except Mismatch:
        return None
    return text if same else None
