"""The plans of one rank's trainer, as a program: FILE WORLD_SIZE RANK STEPS OUTPUT, a JSON file."""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    file, output = sys.argv[1], Path(sys.argv[5])
    world_size, rank, steps = map(int, sys.argv[2:5])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    from wlb_titan.runtime.models.load import load_config
    from wlb_titan.runtime.one_rank.dry_run import DryTrainer

    trainer = DryTrainer(load_config(file, (), world_size).config, rank=rank, world_size=world_size)
    loader = iter(trainer.planned)
    output.write_text(json.dumps([next(loader).plan.to_json() for _ in range(steps)]))
    trainer.close()
