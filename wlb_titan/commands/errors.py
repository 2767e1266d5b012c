"""The one place where an exception becomes what the user reads.

A `UserError` becomes one paragraph on stderr and exit code 2, Ctrl-C one line and exit code 130. Anything
else is a defect and keeps its traceback.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import click

from wlb_titan.errors import EXIT_USER_ERROR, UserError

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


class Refused(click.ClickException):
    """A user's mistake."""

    exit_code = EXIT_USER_ERROR


@contextmanager
def errors_for_the_user() -> Iterator[None]:
    """Turns errors made for the user into click's own, which click shows without a traceback."""
    try:
        yield
    except UserError as error:
        raise Refused(str(error)) from error
    except KeyboardInterrupt:
        click.echo("\nInterrupted.", err=True)
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None


def check_outputs(**places: Path | None) -> None:
    """Refuses, before anything is done, what could not be written at the end.

    Args:
        places: by option; the folder of `report` is made then, those of other files must be there.

    Raises:
        UserError: a place cannot be written, or a report needs vl-convert, which is not installed.
    """
    for option, path in places.items():
        if path is None:
            continue
        if option == "report" and find_spec("vl_convert") is None:
            raise UserError("A report needs vl-convert. Install it with: pip install 'wlb-titan[report]'")
        with writing(f"--{option}: {path}"):
            place = path.absolute()
            while option == "report" and not place.exists():
                place = place.parent
            if option != "report" and not place.parent.is_dir():
                raise NotADirectoryError(0, f"there is no folder {path.parent}")
            if place.exists() and place.is_dir() != (option == "report"):
                raise FileExistsError(0, f"{place} is a {'folder' if place.is_dir() else 'file'}")
            if not os.access(place if place.exists() else place.parent, os.W_OK):
                raise PermissionError(0, "this user may not write there")


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Says what could not be written where the file system refuses it.

    Raises:
        UserError: it does.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be written: {error.strerror}.") from error
