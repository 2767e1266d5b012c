"""The process of one rank, as `dryrun`, `rehearse` and traces of layers start it for each rank:

    python -m wlb_titan.runtime.one_rank.process '{"run": "dryrun", "rank": 3, "world_size": 64, ...}'

Its argument is JSON: "run" is "dryrun", "rehearse" or "layers", "file" and "overrides" name the job, and
"result" the file to write. The rest are the trainer's own keywords.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from wlb_titan.errors import UserError, drop_peers_warnings
from wlb_titan.files import save


def main() -> None:
    """Exits with 1 after an error, which is written in place of a result."""
    drop_peers_warnings()
    asked = json.loads(sys.argv[1])
    path = Path(asked.pop("result"))
    try:
        found = result(**asked)
    except UserError as error:
        found = {"rank": asked["rank"], "error": str(error)}
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        found = {"rank": asked["rank"], "error": said, "traceback": traceback.format_exc()}
    save(path, found)
    sys.exit("error" in found)


def result(
    run: str, *, file: str, overrides: list[str], rank: int, world_size: int, **keywords: Any
) -> dict[str, Any]:
    from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator
    from wlb_titan.runtime.train import set_allocator

    # What a launcher would tell torch and torchtitan, before torchtitan is imported.
    set_allocator()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    use_cpu_without_accelerator()
    import torch

    from wlb_titan.runtime.models.load import load_config
    from wlb_titan.runtime.one_rank.dry_run import DryTrainer
    from wlb_titan.runtime.one_rank.layer_trace import LayerTracer
    from wlb_titan.runtime.one_rank.rehearsal import RehearsalTrainer

    if not torch.accelerator.is_available():
        torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.ERROR)
    config = load_config(file, overrides, world_size=world_size).config
    trainers = {"dryrun": DryTrainer, "rehearse": RehearsalTrainer, "layers": LayerTracer}
    trainer = trainers[run](config, rank=rank, world_size=world_size, **keywords)
    try:
        return trainer.run()
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
