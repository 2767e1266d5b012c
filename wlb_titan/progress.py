"""How far a long activity is: every room may tell, and a command draws what it is told."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""Is told of an activity, how much of it is done, and how much there is (0: unknown)."""


def silent(what: str, done: int, total: int) -> None:
    """Draws nothing."""


def counted(values: Sequence[T], report: Progress, what: str) -> Iterator[T]:
    """The values; before each it reports how many of them are done."""
    for done, value in enumerate(values):
        report(what, done, len(values))
        yield value
