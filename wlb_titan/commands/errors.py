"""The one place where an exception becomes what the user reads.

A `UserError` becomes one paragraph on stderr and exit code 2, Ctrl-C one line and exit code 130. Anything
else is a defect and keeps its traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from wlb_titan.errors import EXIT_USER_ERROR, UserError

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


@contextmanager
def errors_for_the_user() -> Iterator[None]:
    """Turns errors made for the user into click's own, which click shows without a traceback."""
    try:
        yield
    except UserError as error:
        refused = click.ClickException(str(error))
        refused.exit_code = EXIT_USER_ERROR
        raise refused from error
    except KeyboardInterrupt:
        click.echo("\nInterrupted.", err=True)
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None


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
