"""Printing that the subcommands share: tables, and warnings once each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from wlb_titan.simulator.choice import Choice

UNBOUNDED = 100_000  # characters
TABLE_WIDTH = 128  # characters, where no terminal tells its own
LEFT = ("policy", "sharding", "chosen", "degrees", "memory", "collective", "over", "setting", "figure", "")
"""Headings of words, which are aligned to the left; figures to the right."""


def make_console() -> Console:
    """A console as wide as its terminal, or `TABLE_WIDTH` characters where none tells its own width."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, TABLE_WIDTH)
    return console


def say(*lines: str) -> None:
    """Prints lines as they are, however long."""
    console = make_console()
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def show_table(rows: Sequence[dict[str, str]], console: Console | None = None) -> None:
    """Prints rows that have the same headings as a table; where a terminal is too narrow, as plain lines.

    What is piped gets the whole table, however wide.
    """
    import rich.box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=rich.box.SIMPLE_HEAD)
    for heading in rows[0]:
        table.add_column(Text(heading), justify="left" if heading in LEFT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row.values()))  # as they are: brackets are no markup
    console = console or make_console()
    needed = console.measure(table, options=console.options.update(width=UNBOUNDED)).maximum
    if console.is_terminal and needed > console.width:
        for row in rows:
            cells = "  ".join(f"{heading} {cell}" for heading, cell in row.items() if cell)
            console.print(cells, markup=False, highlight=False, soft_wrap=True)
    else:
        console.width = max(needed, console.width)
        console.print(table)


def print_choice(choice: Choice) -> None:
    """What `auto` stands for, and the predictions of all that it may."""
    show_table(choice.rows())
    say(*choice.remarks())


@contextmanager
def warnings_once() -> Iterator[None]:
    """Collects the UserWarnings of a block and prints each of them once, to stderr, when it ends."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        click.echo(f"Warning: {message}", err=True)
