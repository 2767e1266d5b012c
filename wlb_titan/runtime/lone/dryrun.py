"""One rank of a job on fake tensors: `python -m wlb_titan.runtime.lone.dryrun ... FILE [overrides]`.

The process is one rank of a world that is not there: its process group answers every collective at once, and
its tensors have shapes and types but no memory. Everything else is the job's own: the model is built and
parallelised, a planned step goes through the pipeline's schedule, forward and backward, gradients are clipped
and the optimizer runs. `wlb-titan dryrun` starts one such process for each rank that is asked for.

What differs from the job, and how:

- The device is the CPU. RMSNorm there is made of single operations in float32, and is one kernel on CUDA: in
  a dry run it allocates what that kernel does. Attention allocates what its kernels do: their output, the
  log-sum-exp in float32, and the three gradients.
- torch.compile is off: what it fuses or keeps differently is not seen.
- Parameters are not initialised and nothing is loaded: they have no values.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from wlb_titan.runtime.lone.process import answer, become_rank


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--rank", required=True, type=int, help="Global rank to run.")
@click.option("--world-size", required=True, type=int, help="Processes of the job.")
@click.option("--step", required=True, type=int, help="Which step of the plan to run, from 1.")
@click.option("--device-bytes", required=True, type=float, help="Memory of a GPU, which bounds plans.")
@click.option("--result", required=True, type=click.Path(path_type=Path), help="JSON file to write.")
@click.argument("file")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def main(rank: int, result: Path, **arguments: Any) -> None:
    """Runs one rank of FILE's job on fake tensors and writes what it found to a JSON file."""
    answer(rank, result, lambda: [dry_rank(rank, **arguments)])


def dry_rank(
    rank: int, *, file: str, overrides: tuple[str, ...], world_size: int, step: int, device_bytes: float
) -> dict[str, Any]:
    """Builds one rank of a job and runs one planned step of it; arguments as of the command.

    Returns:
        What `wlb-titan dryrun --output` writes of a rank; see docs/dryrun.md.

    Raises:
        UserError: the configuration cannot run.
    """
    become_rank(rank, world_size)
    import torch

    torch.set_num_threads(1)
    from wlb_titan.runtime.lone.dry_trainer import DryTrainer
    from wlb_titan.runtime.models.load import load_config

    logging.getLogger().setLevel(logging.ERROR)
    resolved = load_config(file, overrides, world_size=world_size)
    trainer = DryTrainer(resolved.config, rank=rank, world_size=world_size, device_bytes=device_bytes)
    try:
        return trainer.run(step)
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
