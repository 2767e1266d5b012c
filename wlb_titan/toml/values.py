"""Plain TOML values and the type hints of dataclass fields: conversion one way, TOML text the other way.

TOML has no null: the string "none" stands for None where the field allows None.

pydantic checks values, strictly. A hint may say which numbers are meant, as `Annotated[int, Ge(1)]` does, in
the words of the library `annotated_types`: Ge, Gt, Le, Lt, Interval, and MinLen for a string or list. They
hold for each element in `list[Annotated[int, Ge(2)]]`. Two rules need no annotation: a float is a finite
number, and an integer has 64 bits.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli
from annotated_types import BaseMetadata, Ge, GroupedMetadata, Gt, Le, Lt

NONE = "none"
LARGEST_INTEGER = 2**63 - 1

LIMITS = {Ge: "at least {0.ge}", Gt: "above {0.gt}", Le: "at most {0.le}", Lt: "below {0.lt}"}
"""Kind of limit -> its words."""


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
    """The numbers that `Annotated` allows anywhere in a hint: in an alternative, or a list's elements."""
    if isinstance(hint, BaseMetadata) and type(hint) in LIMITS:
        return (hint,)
    inner = hint if isinstance(hint, GroupedMetadata) else get_args(hint)
    return tuple(itertools.chain.from_iterable(map(limits_of, inner)))


def convert(value: object, hint: object, guide: object = None) -> Any:
    """What a field of type `hint` holds for a value that tomli read; a Mismatch says what it should be.

    An integer becomes a float where only a float is asked for, an array a tuple where a tuple is asked for or
    where `guide`, the value that it replaces, is one.
    """
    from pydantic import ValidationError  # takes long, and many commands read no settings

    if value == NONE and allows_none(hint):
        return None
    if not is_sound(value):
        numbers = "numbers should be finite and have at most 64 bits"
        raise Mismatch(f"strings may not contain zero bytes, {numbers}, and dates are not supported")
    try:
        result = _adapter(hint).validate_json(json.dumps(value))
    except ValidationError as error:
        rules = dict.fromkeys(map(rule, error.errors()))
        none = f' or be "{NONE}"' if allows_none(hint) else ""
        raise Mismatch(f"{' or '.join(rules)}{none}") from None
    return tuple(result) if isinstance(result, list) and isinstance(guide, tuple) else result


@functools.cache
def _adapter(hint: object) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(_with_tables(hint), config=ConfigDict(strict=True, arbitrary_types_allowed=True))


def _with_tables(hint: Any) -> Any:
    """A hint with a dict in place of each dataclass: they are made elsewhere."""
    from pydantic import BeforeValidator

    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Annotated[_with_tables(arguments[0]), *arguments[1:]]
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, map(_with_tables, arguments))
    if origin in (list, tuple, dict):
        return types.GenericAlias(origin, tuple(map(_with_tables, arguments)))
    if origin is Literal:  # of 1, pydantic takes 1.0 and true too
        kinds = {type(option) for option in arguments}
        return Annotated[hint, BeforeValidator(lambda value: value if type(value) in kinds else ...)]
    return dict if isinstance(hint, type) and is_dataclass(hint) else hint


def rule(error: Mapping[str, Any]) -> str:
    """An error of pydantic's in our words: `should be a valid integer`, `element 1: should be a table`."""
    if error["type"] == "needs_python_object":
        return "should be a Python object, which only a base can give"
    place = ".".join(str(key) for key in error["loc"] if isinstance(key, int))
    _, should, rest = error["msg"].replace("an object", "a table").partition(" should ")
    return (f"element {place}: " if place else "") + (f"should {rest}" if should else error["msg"])


def is_sound(value: object) -> bool:
    """Whether JSON and paths have it, and all numbers are finite and of at most 64 bits."""
    if isinstance(value, int):
        return abs(value) <= LARGEST_INTEGER
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict | list):
        return all(map(is_sound, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and "\0" not in value


def in_words(limits: Iterable[BaseMetadata]) -> str:
    """`(Gt(0), Le(1))` -> `above 0 and at most 1`."""
    return " and ".join(LIMITS[type(limit)].format(limit) for limit in limits)


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
