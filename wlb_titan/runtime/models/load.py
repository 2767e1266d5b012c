"""From a TOML file and command-line overrides to a torchtitan configuration that is ready to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wlb_titan.config import Resolved, resolve
from wlb_titan.config.load import LOCKED
from wlb_titan.config.ranges import check_ranges, described_ranges


def load_config(path: str | Path, overrides: Sequence[str] = (), world_size: int | None = None) -> Resolved:
    """Load a TOML file with all that it extends: command-line overrides over the file over its base.

    Args:
        overrides: `["--training.steps", "5", "--training.seq_len=4096"]`.
        world_size: the number of ranks, if known; the degrees of parallelism must then fit it.

    Raises:
        ConfigError: the user's mistake, with its place.
    """

    # torchtitan takes seconds to import, so that is left until the files have been read without a mistake.
    def base_config(name: str) -> Any:
        from wlb_titan.runtime.models import registry

        return registry.base_config(name)

    def validate(config: Any) -> None:
        from wlb_titan.runtime.checks import config as validation

        validation.validate(config, world_size)

    resolved = resolve(path, overrides, base_config)
    from wlb_titan.runtime.models.ranges import RANGES

    resolved.check(lambda config: check_ranges(config, RANGES, LOCKED))
    resolved.check(validate)
    return replace(resolved, ranges=described_ranges(resolved.config, RANGES, LOCKED))
