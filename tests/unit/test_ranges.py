"""Ranges beside docstrings: read off any dataclass, at any depth, and said in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Interval, Le, MinLen, MultipleOf

from wlb_titan.config.ranges import check_ranges, described_ranges
from wlb_titan.errors import UserError


@dataclass
class PlugIn:
    """As somebody else may write one."""

    rate: Annotated[float, Gt(0), Le(float("inf"))] = 1.0
    share: Annotated[float, Interval(gt=0, lt=1)] | None = None
    lengths: Annotated[list[Annotated[int, Ge(2)]], MinLen(1)] | Literal["auto"] = "auto"
    even: Annotated[int, MultipleOf(2)] = 0
    name: Annotated[str, MinLen(1)] = "x"
    switch: bool = True
    free: float = 0.0


@dataclass
class Foreign:
    """Of a library that knows no annotations; the table speaks for it and for classes derived from it."""

    steps: int = 1


@dataclass
class Derived(Foreign):
    pass


@dataclass
class Job:
    plug_in: PlugIn = field(default_factory=PlugIn)
    foreign: Foreign = field(default_factory=Derived)
    many: list[PlugIn] = field(default_factory=list)
    words: dict[str, object] = field(default_factory=dict)


TABLE = {Foreign: {"steps": (Ge(1),)}}


@pytest.mark.parametrize(
    "job",
    [
        Job(),
        Job(PlugIn(rate=float("inf"), share=0.5, lengths=[2, 3], even=4)),
        Job(many=[PlugIn()], words={"lr": 1e-3, "betas": (0.9, 0.95), "name": ""}),
    ],
)
def test_what_is_in_range(job):
    check_ranges(job, TABLE)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job(PlugIn(rate=0.0)), r"plug_in.rate: above 0 and inf for no bound, got 0\.0\."),
        (Job(PlugIn(rate=float("nan"))), r"plug_in.rate: a finite number, above 0"),
        (Job(PlugIn(share=1.0)), r"plug_in.share: above 0 and below 1, got 1\.0"),
        (Job(PlugIn(lengths=[])), r"plug_in.lengths: not empty, got \[\]"),
        (Job(PlugIn(lengths=[5, 1])), r"plug_in.lengths: at least 2, got \[5, 1\]"),
        (Job(PlugIn(even=3)), r"plug_in.even: a multiple of 2, got 3"),
        (Job(PlugIn(name="")), r'plug_in.name: not empty, got ""'),
        (Job(PlugIn(free=float("inf"))), r"plug_in.free: a finite number, got inf"),
        (Job(PlugIn(even=2**80)), r"plug_in.even: an integer of at most 64 bits"),
        (Job(foreign=Derived(0)), r"foreign.steps: at least 1, got 0"),
        (Job(many=[PlugIn(), PlugIn(share=-1.0)]), r"many\.1\.share"),
        (Job(words={"a": {"b": float("nan")}}), r"words\.a\.b: a finite number, got nan"),
    ],
)
def test_what_is_not(job, message):
    with pytest.raises(UserError, match=message):
        check_ranges(job, TABLE)


def test_what_is_skipped():
    check_ranges(Job(PlugIn(rate=-1.0)), TABLE, skipped=["plug_in"])


def test_ranges_in_words():
    words = described_ranges(Job(), TABLE)
    assert words["plug_in.share"] == "above 0 and below 1"
    assert words["plug_in.lengths"] == "at least 2"
    assert words["foreign.steps"] == "at least 1"
    assert "plug_in.name" not in words and "plug_in.free" not in words
