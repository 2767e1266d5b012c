"""One value, its type and its range: conversion from TOML, and TOML text that reads back."""

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
import tomli
from annotated_types import Ge, Gt, Interval, MinLen
from hypothesis import given
from hypothesis import strategies as st

from wlb_titan.toml.values import Mismatch, convert, expressed, key_text, to_text

Rate = Annotated[float, Gt(0)]
Share = Annotated[float, Interval(gt=0, lt=1)] | None
Lengths = Annotated[list[Annotated[int, Ge(2)]], MinLen(1)] | Literal["auto"]


@dataclass
class Section:
    pass


@pytest.mark.parametrize(
    "value, hint, result",
    [
        (5, float, 5.0),
        (5, float | int, 5),
        (5.0, float | int, 5.0),
        ("none", int | None, None),
        ("none", str, "none"),
        ("none", Literal["none", "some"], "none"),
        ([1, 2], list[float], [1.0, 2.0]),
        ([["a"], []], list[list[str]] | None, [["a"], []]),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        ("none", Share, None),
        (0.5, Share, 0.5),
        ([2, 3], Lengths, [2, 3]),
        ("auto", Lengths, "auto"),
        ("none", Annotated[int | None, Ge(1)], None),
        ({"name": "", "betas": [0.9]}, Any, {"name": "", "betas": [0.9]}),
        (["x", ["y", {"k": 1}]], list[str | tuple[str, dict[str, Any]]], ["x", ("y", {"k": 1})]),
    ],
)
def test_a_value_becomes_what_its_hint_asks_for(value, hint, result):
    converted = convert(value, hint)
    assert converted == result
    assert type(converted) is type(result)


def test_an_array_for_anything_takes_the_kind_of_what_it_replaces():
    assert convert([1, 2], Any, guide=(3, 4)) == (1, 2)
    assert convert([1, 2], Any, guide=[3, 4]) == convert([1, 2], Any) == [1, 2]


@pytest.mark.parametrize(
    ("hint", "rule", "wrong"),
    [
        (int, "should be a valid integer", [5.0, True, "5", "none"]),
        (bool, "should be a valid boolean", [1]),
        (float, "should be a valid number", [True]),
        (float, "64 bits, and dates are not supported", [float("inf"), float("nan"), 2**80]),
        (str, "should be a valid string", [5]),
        (float | None, 'should be a valid number or be "none"', ["5"]),
        (Literal["a", "b"], "should be 'a' or 'b'", ["c"]),
        (Literal[1, True], "should be 1 or True", [1.0, 0]),
        (list[list[str]], "element 1.0: should be a valid string", [[["a"], [1]]]),
        (tuple[int, int], "element 1: Field required", [[1]]),
        (dict[str, int], "should be a table", [[1, 2]]),
        (Section | None, 'should be a table or be "none"', [5]),
        (re.Match, "should be a Python object, which only a base can give", ["none"]),
        (Callable[[int], int], "should be callable", ["none"]),
        (Any, "dates are not supported", [datetime.date(2024, 1, 1), {"a": [{"b": float("nan")}]}]),
        (Rate, "should be greater than 0", [0.0]),
        (Share, 'should be less than 1 or be "none"', [1.0]),
        (Lengths, "should have at least 1 item after validation, not 0 or should be 'auto'", [[]]),
        (Lengths, "element 1: should be greater than or equal to 2 or should be 'auto'", [[5, 1]]),
        (Annotated[str, MinLen(1)], "should have at least 1 character", [""]),
        (Annotated[int | None, Ge(1)], 'should be greater than or equal to 1 or be "none"', [0]),
    ],
)
def test_what_a_hint_refuses_and_the_rule_that_it_names(hint, rule, wrong):
    for value in wrong:
        with pytest.raises(Mismatch, match=re.escape(rule) + "$"):
            convert(value, hint)


text = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.booleans() | st.integers() | st.floats(allow_nan=False) | text
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(text, inner), max_leaves=10)


@given(text, values)
def test_toml_text_reads_back(key, value):
    document = tomli.loads(f"{key_text(key)} = {to_text(value)}")
    assert document == {key: value}
    assert type(document[key]) is type(value)


@pytest.mark.parametrize("value", [print, {1: 2}, datetime.date(2024, 1, 1), [None, print], Section()])
def test_some_values_have_no_toml(value):
    with pytest.raises(Mismatch):
        to_text(value)


def test_a_value_that_would_read_back_as_another_is_not_expressed():
    assert expressed("nine", str | None) == '"nine"'
    assert expressed("none", str | None) is None, '"none" would read back as None'
    assert expressed(None, str | None) == '"none"'
    assert expressed(((1,),), Any) is None, "the inner tuple would read back as a list"
    assert expressed((1,), Any) == "[1]"
