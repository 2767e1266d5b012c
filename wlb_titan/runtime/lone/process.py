"""A process that is one rank of a job, as `wlb-titan dryrun` and `rehearse` start it, and its result."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from wlb_titan.errors import UserError


def answer(rank: int, path: Path, find: Callable[[], Iterable[dict[str, Any]]]) -> None:
    """Writes what a rank finds, anew each time that it finds more, and exits: with 1 after an error, which is
    written beside what was found before it.

    Args:
        rank: global rank.
        path: JSON file.
        find: yields results, each with all that the one before it had.
    """
    found: dict[str, Any] = {"rank": rank}
    try:
        for found in find():
            _write(path, found)
    except UserError as error:
        _write(path, {**found, "error": str(error)})
        sys.exit(1)
    except Exception as error:
        facts = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        _write(path, {**found, **facts})
        sys.exit(1)


def _write(path: Path, found: dict[str, Any]) -> None:
    """The file is whole at any moment: the process may be stopped at any."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found), encoding="utf-8")
    os.replace(new, path)


def become_rank(rank: int, world_size: int) -> None:
    """Tells torch and torchtitan what a launcher would. Call it before torchtitan is imported."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

    use_cpu_without_accelerator()
