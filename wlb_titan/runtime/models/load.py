"""From a TOML file and overrides to a torchtitan configuration that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from wlb_titan.config.load import Resolved, resolve
from wlb_titan.errors import UserError, warn
from wlb_titan.job import Job


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


def trace_layers(
    path: str | Path, overrides: Sequence[str], config: Any, jobs: Iterable[Job]
) -> Callable[[Job], Job]:
    """Traces the layers of jobs of a configuration, as far as predictions need it and they are not known yet.
    Returns what gives a job their accounts; a job whose layers cannot be traced is predicted without."""
    from wlb_titan.runtime import accounts
    from wlb_titan.runtime.configured import degrees_product, told

    asking = [job for job in jobs if job.memory_unknown and job.cluster.kind == "gpu"]
    shapes = sorted({shape for job in asking for shape in job.layer_shapes})
    if shapes:
        try:
            accounts.trace(path, overrides, config, degrees_product(config), shapes)
        except UserError as error:
            warn(f"{error}. Their memory is not predicted.")
    return lambda job: told(config, job, shapes)
