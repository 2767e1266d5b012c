"""Errors whose message is written for the user: one paragraph that says what is wrong and what to do.

The command line shows the message alone, without a traceback, and exits with code 2.
"""


class UserError(ValueError):
    """A mistake that the user can mend."""


class ConfigError(UserError):
    """A mistake in a TOML file or in a command-line override.

    Every message starts with where the mistake is: `train.toml:12`, `train.toml` or `command line`.
    """


class CorpusError(UserError):
    """A corpus cannot be read or made; the message names the path."""


class PlanError(UserError):
    """Lengths, settings, a job or a saved state from which no plan or prediction can be made."""
