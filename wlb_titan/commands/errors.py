"""The one place where an exception becomes what the user reads.

A `UserError` becomes one paragraph on stderr and exit code 2, Ctrl-C one line and exit code 130. Anything
else is a defect and keeps its traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from wlb_titan.errors import EXIT_USER_ERROR, UserError

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


class _UserMistake(click.ClickException):
    exit_code = EXIT_USER_ERROR


class _Interrupted(click.ClickException):
    exit_code = EXIT_INTERRUPTED

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo("\nInterrupted.", err=True, file=file)


@contextmanager
def errors_for_the_user() -> Iterator[None]:
    """Turn errors made for the user into click's own, which click shows without a traceback."""
    try:
        yield
    except UserError as error:
        raise _UserMistake(str(error)) from error
    except KeyboardInterrupt:
        raise _Interrupted("") from None
