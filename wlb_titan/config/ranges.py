"""Ranges of the numbers in a field: `Annotated[int, Ge(1)]` beside its docstring, read by everybody.

Any dataclass may say it of its own fields, plug-ins' too, with the words of the `annotated_types` library:
Ge, Gt, Le, Lt, Interval, MultipleOf, and MinLen for a string or list. They hold for the number itself or, in
`list[Annotated[int, Ge(2)]]`, for each element. Of classes that are not ours, whose fields cannot be
annotated, the caller brings a table (`runtime/models/ranges.py`).

Two rules need no annotation: a float is a finite number unless its range says Le(inf), and an integer has 64
bits.
"""

from __future__ import annotations

import functools
import math
import operator
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from annotated_types import BaseMetadata, Ge, GroupedMetadata, Gt, Le, Lt, MinLen, MultipleOf

from wlb_titan.config.values import shown
from wlb_titan.errors import UserError

Table = Mapping[type, Mapping[str, tuple[BaseMetadata | GroupedMetadata, ...]]]
"""Class -> field -> its range."""

KINDS: dict[type, tuple[str, Callable[[Any, Any], bool], str]] = {
    Ge: ("ge", operator.ge, "at least {}"),
    Gt: ("gt", operator.gt, "above {}"),
    Le: ("le", operator.le, "at most {}"),
    Lt: ("lt", operator.lt, "below {}"),
    MultipleOf: ("multiple_of", lambda value, unit: value % unit == 0, "a multiple of {}"),
    MinLen: ("min_length", lambda value, least: len(value) >= least, "at least {} long"),
}
"""Kind of a limit -> where its bound stands, whether a value keeps to it, and what messages say."""

NAMED: dict[BaseMetadata, str] = {Le(math.inf): "inf for no bound", MinLen(1): "not empty"}

LARGEST_INTEGER = 2**63 - 1


def check_ranges(config: object, table: Table, skipped: Iterable[str] = ()) -> None:
    """Make sure that every number in a tree of dataclasses, lists and dicts lies in its field's range.

    Args:
        table: ranges of classes that are not ours.
        skipped: dotted paths that are not looked into.

    Raises:
        UserError: `key: at least 1, got 0.`, with the dotted path of the first that does not.
    """
    for key, value, limits in _values(config, "", table, frozenset(skipped), ()):
        if reason := _objection(value, limits):
            raise UserError(f"{key}: {reason}, got {shown(value)}.")


def described_ranges(config: object, table: Table, skipped: Iterable[str] = ()) -> dict[str, str]:
    """Dotted path -> its range in words, such as `at least 1`, of all numbers that have one."""
    found = _values(config, "", table, frozenset(skipped), ())
    numbers = {key: [x for x in limits if not isinstance(x, MinLen)] for key, _, limits in found}
    return {key: describe(limits) for key, limits in numbers.items() if limits}


def describe(limits: Iterable[BaseMetadata]) -> str:
    """`(Gt(0), Le(1))` -> `above 0 and at most 1`."""
    return " and ".join(_words(limit) for limit in limits)


def _values(
    value: object, path: str, table: Table, skipped: frozenset[str], limits: tuple[BaseMetadata, ...]
) -> Iterator[tuple[str, object, tuple[BaseMetadata, ...]]]:
    """All values that are no containers, and lists of them as a whole, each with path and range."""
    if path in skipped:
        return
    if is_dataclass(value):
        for field in fields(value):
            below = f"{path}.{field.name}" if path else field.name
            yield from _values(
                getattr(value, field.name), below, table, skipped, _limits(type(value), field.name, table)
            )
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _values(child, f"{path}.{key}", table, skipped, ())
    elif isinstance(value, list | tuple) and any(
        isinstance(item, dict) or is_dataclass(item) for item in value
    ):
        for index, child in enumerate(value):
            yield from _values(child, f"{path}.{index}", table, skipped, ())
    else:
        yield path, value, limits


def _limits(cls: type, name: str, table: Table) -> tuple[BaseMetadata, ...]:
    said = _annotated(cls).get(name, ())
    for ancestor in cls.__mro__:
        said = said or table.get(ancestor, {}).get(name, ())
    return tuple(_flat(said))


@functools.cache
def _annotated(cls: type) -> dict[str, tuple[Any, ...]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: tuple(_metadata(hint)) for name, hint in hints.items()}


def _metadata(hint: object) -> Iterator[Any]:
    """What `Annotated` says anywhere in a hint: in the arms of a union and of a list's elements too."""
    yield from getattr(hint, "__metadata__", ())
    arguments = typing.get_args(hint)
    for argument in arguments[:1] if hasattr(hint, "__metadata__") else arguments:
        yield from _metadata(argument)


def _flat(metadata: Iterable[Any]) -> Iterator[BaseMetadata]:
    for item in metadata:
        if isinstance(item, GroupedMetadata):
            yield from _flat(item)
        elif type(item) in KINDS:
            yield item


def _objection(value: object, limits: tuple[BaseMetadata, ...]) -> str:
    """What is wrong with a value; empty if nothing is."""
    if isinstance(value, list | tuple):
        own = [limit for limit in limits if isinstance(limit, MinLen)]
        if not all(_holds(value, limit) for limit in own):
            return describe(own)
        each = tuple(limit for limit in limits if not isinstance(limit, MinLen))
        return next(filter(None, (_objection(item, each) for item in value)), "")
    if isinstance(value, float) and not math.isfinite(value):
        unbounded = any(isinstance(limit, Le) and limit.le == math.inf for limit in limits)
        if math.isnan(value) or not unbounded:
            return "a finite number" + (f", {describe(limits)}" if limits else "")
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return "an integer of at most 64 bits"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    wanted = [limit for limit in limits if isinstance(limit, MinLen) == isinstance(value, str)]
    if (number or isinstance(value, str)) and not all(_holds(value, limit) for limit in wanted):
        return describe(wanted)
    return ""


def _holds(value: Any, limit: BaseMetadata) -> bool:
    name, holds, _ = KINDS[type(limit)]
    return bool(holds(value, getattr(limit, name)))


def _words(limit: BaseMetadata) -> str:
    if limit in NAMED:
        return NAMED[limit]
    name, _, words = KINDS[type(limit)]
    return words.format(getattr(limit, name))
