"""How processes end, and errors whose message is written for the user: one paragraph on what to do.

The command line shows the message alone, without a traceback, and exits with code 2.
"""

EXIT_USER_ERROR = 2
EXIT_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: a run has stopped with all saved, and is to be started again."""
ONE_REQUEST = 5.0
"""Seconds in which signals are the same request to stop: schedulers repeat theirs, launchers pass it on."""


class UserError(ValueError):
    """A mistake that the user can mend.

    Args:
        message: the paragraph.
        setting: the setting to blame, as a dotted key or the end of one (`packing.max_length`); where the
            mistake is found by a configuration, the message gets the file, line and value of that key.
    """

    def __init__(self, message: str, *, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting


class ConfigError(UserError):
    """A mistake in a TOML file or in a command-line override.

    Every message starts with where the mistake is: `train.toml:12`, `train.toml` or `command line`.
    """


class CorpusError(UserError):
    """A corpus cannot be read or made; the message names the path."""


class PlanError(UserError):
    """Lengths, settings, a job or a saved state from which no plan or prediction can be made."""
