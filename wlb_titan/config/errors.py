"""The one error of this package: a configuration that the user can mend."""

from __future__ import annotations

from wlb_titan.errors import UserError


class ConfigError(UserError):
    """A mistake in a TOML file or in a command-line override, told in one paragraph.

    Every message starts with where the mistake is: `train.toml:12`, `train.toml` or `command line`.
    """
