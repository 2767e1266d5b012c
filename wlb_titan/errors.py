"""How processes end, and errors whose message tells the user what to do, in one paragraph.

The command line shows only the message, without a traceback, and exits with code 2.
"""

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
