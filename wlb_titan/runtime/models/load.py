"""From a TOML file and overrides to a torchtitan configuration that is ready to run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wlb_titan.config.load import Resolved, resolve
from wlb_titan.errors import UserError, warn
from wlb_titan.job import Job, Policy

logger = logging.getLogger(__name__)


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


def tracing(path: str | Path, overrides: Sequence[str], config: Any) -> Callable[..., Job]:
    """Gives a job of this configuration, and optionally policies, the accounts of its layers under them.
    Those that are not known yet are traced; where that fails it warns, and memory is not predicted."""
    from wlb_titan.runtime import accounts
    from wlb_titan.runtime.configured import degrees_product

    def told(job: Job, policies: Iterable[Policy] = ()) -> Job:
        shapes = accounts.shapes_of(job, policies)
        missing = sorted(set(shapes) - set(accounts.known(config, shapes)))
        if missing and job.cluster.kind == "gpu":
            begin = time.monotonic()
            try:
                accounts.trace(path, overrides, config, degrees_product(config), missing)
                seconds = time.monotonic() - begin
                logger.info(f"Traced the model's layers in {seconds:.0f} s; kept in {accounts.KEPT}")
            except UserError as error:
                warn(f"{error} Memory is not predicted, and times are a dense model's.")
        return replace(job, accounts=accounts.known(config, shapes))

    return told
