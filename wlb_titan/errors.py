"""How processes end, and errors whose message tells the user what to do, in one paragraph.

The command line shows only the message, without a traceback, and exits with code 2.
"""

import errno
import logging
import os
import shlex
import stat
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

EXIT_USER_ERROR = 2
EXIT_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: a run has saved all and stopped, and is to be started again
ONE_REQUEST = 5.0
"""Seconds in which signals are one request to stop: schedulers repeat theirs, launchers pass it on."""


class UserError(ValueError):
    """A mistake that the user can mend. To the message, configurations add file, line and value of `setting`,
    a dotted key or the end of one (`packing.max_length`)."""

    def __init__(self, message: str, *, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting


class ConfigError(UserError):
    """A mistake in settings; the message starts with `train.toml:12`, `train.toml` or `command line`."""


class CorpusError(UserError):
    """A corpus cannot be read or made; the message names the path."""


class PlanError(UserError):
    """Lengths, settings, a job or a saved state that allow no plan or prediction."""


@contextmanager
def refusing(wrong: Callable[[str], UserError]) -> Iterator[None]:
    """Whatever goes wrong with a file of others becomes the error that `wrong` makes of the reason."""
    try:
        yield
    except (UserError, NameError, AssertionError):  # no bytes raise the last two: they are defects of ours
        raise
    except Exception as error:  # libraries raise anything of damaged bytes, and nonsense raises the rest
        raise wrong(_reason(error)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason} at byte {error.start}"
    text = str(error).partition("\n")[0]
    if isinstance(error, ValueError) and text:
        return text
    last = traceback.extract_tb(error.__traceback__)[-1]  # who looks for a defect of ours begins there
    return f"{type(error).__name__} {text}".rstrip() + f", {Path(last.filename).name}:{last.lineno}"


def regular_file(path: str | os.PathLike[str]) -> Path:
    """The path; an OSError unless a file is there that ends, as a pipe need not."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return Path(path)


def shell_line(*words: str | os.PathLike[str]) -> str:
    """`wlb-titan WORD...`, to be copied from a message into a shell."""
    return f"`{shlex.join(['wlb-titan', *map(str, words)])}`"


quiet = ContextVar("quiet", default=False)
"""Whether `warn` is silent in this thread; `warnings.catch_warnings` would silence the others, too."""


def drop_peers_warnings() -> None:
    """Drops what torchao has torch warn of, where it is installed, as torchtitan imports it."""
    logging.getLogger("torch.utils._pytree").addFilter(lambda said: "Enum subclass" not in said.getMessage())


def warn(message: str) -> None:
    """Warns the user of what a plan or prediction finds."""
    if not quiet.get():
        warnings.warn(message, stacklevel=3)
