"""The process of one rank, as `wlb-titan dryrun` and `rehearse` start it for each rank:

    python -m wlb_titan.runtime.one_rank.process '{"run": "dryrun", "rank": 3, "world_size": 64, ...}'

Its argument is JSON: "run" is "dryrun" or "rehearse", "file" and "overrides" name the job, and "result" the
file to write. The rest are the trainer's own keywords.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wlb_titan.errors import UserError


def main() -> None:
    """Writes results as they come; exits with 1 after an error, written beside what was found before it."""
    asked = json.loads(sys.argv[1])
    path = Path(asked.pop("result"))
    found: dict[str, Any] = {"rank": asked["rank"]}
    try:
        for found in results(**asked):
            _write(path, found)
    except UserError as error:
        _write(path, {**found, "error": str(error)})
        sys.exit(1)
    except Exception as error:
        facts = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        _write(path, {**found, **facts})
        sys.exit(1)


def results(
    run: str, *, file: str, overrides: list[str], rank: int, world_size: int, **keywords: Any
) -> Iterator[dict[str, Any]]:
    become_rank(rank, world_size)
    import torch

    from wlb_titan.runtime.models.load import load_config
    from wlb_titan.runtime.one_rank.dry_run import DryTrainer
    from wlb_titan.runtime.one_rank.rehearsal import RehearsalTrainer

    if not torch.accelerator.is_available():
        torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.ERROR)
    config = load_config(file, overrides, world_size=world_size).config
    kind: Any = {"dryrun": DryTrainer, "rehearse": RehearsalTrainer}[run]
    trainer = kind(config, rank=rank, world_size=world_size, **keywords)
    try:
        yield from trainer.run()
    finally:
        trainer.close()


def become_rank(rank: int, world_size: int) -> None:
    """Tells torch and torchtitan what a launcher would. Call it before torchtitan is imported."""
    from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator
    from wlb_titan.runtime.train import allow_segments_to_grow

    allow_segments_to_grow()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    use_cpu_without_accelerator()


def _write(path: Path, found: dict[str, Any]) -> None:
    """Keeps the file whole: the process may be stopped at any moment."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found), encoding="utf-8")
    os.replace(new, path)


if __name__ == "__main__":
    main()
