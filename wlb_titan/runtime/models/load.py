"""From a TOML file and overrides to a torchtitan configuration that is ready to run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wlb_titan.config.load import Resolved, resolve


def load_config(path: str | Path, overrides: Sequence[str] = (), world_size: int | None = None) -> Resolved:
    """Loads a TOML file with all that it extends; overrides come last and win, such as
    `["--training.steps", "5", "--training.seq_len=4096"]`. Degrees must fit `world_size`, if it is known."""
    resolved = resolve(path, overrides, _base_config)
    from wlb_titan.runtime.checks import validate

    resolved.check(lambda config: validate(config, world_size))
    return resolved


def _base_config(name: str) -> Any:
    """A base. torchtitan takes seconds to import, so the files are read first."""
    from wlb_titan.runtime.models.bases import base_config

    return base_config(name)
