"""The meaning of a TOML file for planning, without importing torch and torchtitan, which takes seconds.

The first command that reads a file does import them, and keeps what it found in the user's cache folder
(`$XDG_CACHE_HOME`, or ~/.cache): the job, the settings that files are checked by, and where each value was
written. The entry's name is a hash of all that it follows from: every line of the file and of those that it
extends, the overrides, the number of processes, the versions of torch, torchtitan and this package's files,
the machine and its GPUs. Files that values name, such as a cluster's, are looked at again when it is read.

Nothing is kept of what was refused, nor where other people's code has a say: a base or a class of another
package, or `override.imports`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import platform
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from wlb_titan.config.build import Entry
from wlb_titan.config.load import Resolved
from wlb_titan.config.sources import read_sources
from wlb_titan.config.values import shown
from wlb_titan.job import Job

KEPT = 200
"""Entries in the folder; the oldest go."""

OURS = ("wlb_titan", "torchtitan", "torch")
PACKAGES = ("wlb_titan", "wlb_titan.kernels", "torchtitan")
"""Whose files are looked at; torch, of thousands of files, is known by its version."""

SECTIONS = ("training", "parallelism", "checkpoint")

Stamp = tuple[int, int] | None
"""Size and time of a file; None: there is none."""


@dataclass(frozen=True)
class Facts:
    """What a configuration means.

    Attributes:
        job: as configured, at the degrees of so many processes.
        resolved: where each value was written; its `config` has `wlb`, `dump_folder`, the plain values of
            SECTIONS, and of the model its name, flavor and vocabulary.
    """

    job: Job
    resolved: Resolved

    @property
    def wlb(self) -> Any:
        """[wlb]"""
        return self.resolved.config.wlb


def facts_of(path: str | Path, overrides: Sequence[str] = (), world_size: int | None = None) -> Facts:
    """What a TOML file with overrides means."""
    place = _place(path, overrides, world_size)
    return _read(place) or _found(path, overrides, world_size, place)


def _found(path: str | Path, overrides: Sequence[str], world_size: int | None, place: Path) -> Facts:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        from wlb_titan.runtime.models.load import load_config

        resolved = load_config(path, overrides, world_size)
        from wlb_titan.runtime.job import configured_job, parallel_dims

        config = resolved.config
        # A data-parallel degree of -1, as many as the job turns out to have, is 1 here.
        job = resolved.check(lambda config: configured_job(config, parallel_dims(config, world_size)))
    users = [warning for warning in told if issubclass(warning.category, UserWarning)]
    for warning in users:
        warnings.warn(warning.message, stacklevel=2)
    kept = replace(resolved, config=_plain(config), entries=tuple(map(_entry, resolved.entries)))
    if not users and not _has_foreign_code(config, resolved, job):
        _write(place, job, kept)
    return Facts(job, kept)


def _plain(config: Any) -> SimpleNamespace:
    spec = config.model_spec
    model = SimpleNamespace(vocab_size=spec.model.vocab_size)
    sections = {
        name: SimpleNamespace(
            **{
                field.name: value
                for field in fields(getattr(config, name))
                if isinstance(value := getattr(getattr(config, name), field.name), int | float | str | None)
            }
        )
        for name in SECTIONS
    }
    return SimpleNamespace(
        wlb=config.wlb,
        dump_folder=config.dump_folder,
        model_spec=SimpleNamespace(name=spec.name, flavor=spec.flavor, model=model),
        **sections,
    )


def _entry(entry: Entry) -> Entry:
    """Without a value that TOML cannot express, which may be anything."""
    return entry if entry.text is not None else replace(entry, value=shown(entry.value))


def _has_foreign_code(config: Any, resolved: Resolved, job: Job) -> bool:
    named = [str(entry.value) for entry in resolved.entries if entry.path[-1] == "class"]
    named += [str(resolved.base.value)] * (":" in str(resolved.base.value))
    chosen = (job.packing, job.sharding, job.order, *config.wlb.dimensions)
    named += [one.owner.__module__ for one in chosen]
    return bool(config.override.imports) or any(name.split(".")[0] not in OURS for name in named)


def _place(path: str | Path, overrides: Sequence[str], world_size: int | None) -> Path:
    """Where the facts of a configuration lie, if they were found before."""
    drivers = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    known = (
        read_sources(path, overrides),
        world_size,
        os.getcwd(),
        sys.version,
        platform.node(),
        [driver.read_text() for driver in drivers],
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        metadata.version("torch"),
        list(_files()),
    )
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wlb_titan" / "facts"
    return folder / hashlib.sha256(repr(known).encode()).hexdigest()


def _files() -> Iterator[tuple[str, Stamp]]:
    for package in PACKAGES:
        found = util.find_spec(package)
        for folder in (found and found.submodule_search_locations) or ():
            for file in sorted(Path(folder).rglob("*.py")):
                yield str(file), _stamp(file)


def _stamp(path: str | Path) -> Stamp:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_size, found.st_mtime_ns


def _read(place: Path) -> Facts | None:
    try:
        with place.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None  # what somebody else wrote is not read
            job, resolved, named = pickle.load(file)
        if any(_stamp(name) != stamp for name, stamp in named.items()):
            return None
        return Facts(Job(**job), resolved)
    except Exception:  # whatever a damaged entry makes of itself: it is found anew
        return None


def _write(place: Path, job: Job, resolved: Resolved) -> None:
    """Keeps the facts; a folder that cannot be written to is no reason to complain."""
    words = {entry.value for entry in resolved.entries if isinstance(entry.value, str)}
    content = (
        {field.name: getattr(job, field.name) for field in fields(job) if field.init},
        resolved,
        {word: _stamp(word) for word in words if word},
    )
    with contextlib.suppress(OSError, pickle.PicklingError, AttributeError, TypeError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            file.write(pickle.dumps(content))
        os.replace(file.name, place)
        others = sorted(place.parent.iterdir(), key=lambda other: other.stat().st_mtime_ns)
        for old in others[:-KEPT]:
            old.unlink()
