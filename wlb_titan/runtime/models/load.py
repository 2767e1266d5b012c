"""From a TOML file and overrides to a torchtitan configuration that is ready to run."""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wlb_titan.config import Resolved, resolve

BASES = "wlb_titan.runtime.models.bases"


def load_config(path: str | Path, overrides: Sequence[str] = (), world_size: int | None = None) -> Resolved:
    """Load a TOML file with all that it extends: command-line overrides over the file over its base.

    Args:
        overrides: `["--training.steps", "5", "--training.seq_len=4096"]`.
        world_size: the number of ranks, if known; the degrees of parallelism must then fit it.
    """
    resolved = resolve(path, overrides, _base_config)
    from wlb_titan.runtime.checks.config import validate

    resolved.check(lambda config: validate(config, world_size))
    return resolved


def _base_config(name: str) -> Any:
    """A base; asked for when the files are read without a mistake, as torchtitan takes seconds to import."""
    if BASES not in sys.modules:
        # What an import makes stays to the end. Not to look through half a million objects for garbage again
        # and again spares a second.
        gc.disable()
        importlib.import_module(BASES)
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.enable()
    from wlb_titan.runtime.models.bases import base_config

    return base_config(name)
