"""From a TOML file and overrides to a torchtitan configuration that is ready to run, and its job."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wlb_titan.config.load import Resolved, resolve
from wlb_titan.errors import UserError, warn
from wlb_titan.job import Job, Policy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded(Resolved):
    """A configuration that has been found valid."""

    job: Job
    """With the accounts of its layers that are known; without a world size, a data-parallel degree of -1
    is 1."""
    file: str | Path
    overrides: tuple[str, ...]

    def told(self, job: Job, policies: Iterable[Policy] = ()) -> Job:
        """This job, or one like it, with the accounts of its layers under policies, by default its own and
        those that take turns. Those that are not known yet are traced; where that fails it warns, and memory
        is not predicted."""
        from wlb_titan.runtime import accounts
        from wlb_titan.runtime.checks import turns_of

        turns = map(Policy.parse, turns_of(self.config))
        shapes = accounts.shapes_of(job, [*policies] or [job.policy, *turns])
        missing = sorted(set(shapes) - set(accounts.known(self.config, shapes)))
        if missing and job.cluster.kind == "gpu":
            begin = time.monotonic()
            try:
                accounts.trace(self.config, self.file, self.overrides, self.job.degrees.ranks, missing)
                seconds = time.monotonic() - begin
                logger.info(f"Traced the model's layers in {seconds:.0f} s; kept in {accounts.KEPT}")
            except UserError as error:
                warn(f"{error} Memory is not predicted, and times are a dense model's.")
        return replace(job, accounts=accounts.known(self.config, shapes))


def load_config(path: str | Path, overrides: Sequence[str] = (), world_size: int | None = None) -> Loaded:
    """Loads a TOML file with all that it extends; overrides come last and win, such as
    `["--training.steps", "5", "--training.seq_len=4096"]`. Degrees must fit `world_size`, if it is known."""
    resolved = resolve(path, overrides, _base_config)
    from wlb_titan.runtime.checks import validate

    job = resolved.check(lambda config: validate(config, world_size))
    return Loaded(resolved.config, resolved.base, resolved.entries, job, path, tuple(overrides))


def _base_config(name: str) -> Any:
    """A base. torchtitan takes seconds to import, so the files are read first."""
    from wlb_titan.runtime.models.bases import base_config

    return base_config(name)
