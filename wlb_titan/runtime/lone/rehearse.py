"""One rank of a job for real, alone: `python -m wlb_titan.runtime.lone.rehearse ... FILE [overrides]`.

The process is one rank of a world that is not there. Its model, data, kernels and schedule are the job's own,
on the device at hand; its weights are made up, and its process group answers at once with data that are made
up too (`runtime/lone/group.py`). Whole planned steps run, and every pass of every micro-batch is measured.
`wlb-titan rehearse` starts one such process for each rank that is asked for.

What differs from the job: no other rank is waited for, weights are not trained, and values that come from
other ranks are not theirs, so that experts get as many tokens as this rank sends.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from wlb_titan.errors import UserError
from wlb_titan.memory.rank import GIB
from wlb_titan.runtime.lone.process import answer, become_rank


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--rank", required=True, type=int, help="Global rank to run.")
@click.option("--world-size", required=True, type=int, help="Processes of the job.")
@click.option("--first", required=True, type=int, help="First step of the plan that counts, from 1.")
@click.option("--warm-up", required=True, type=int, help="Steps that are run before it.")
@click.option("--steps", required=True, type=int, help="Steps that count.")
@click.option("--seconds", required=True, type=float, help="After which no further step begins.")
@click.option("--memory-gib", type=float, help="What the rank may take; by default what the device has.")
@click.option("--result", required=True, type=click.Path(path_type=Path), help="JSON file to write.")
@click.argument("file")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def main(rank: int, result: Path, **arguments: Any) -> None:
    """Runs steps of one rank of FILE's job and writes what it measured to a JSON file."""
    answer(rank, result, lambda: rehearse_rank(rank, **arguments))


def rehearse_rank(
    rank: int,
    *,
    file: str,
    overrides: tuple[str, ...],
    world_size: int,
    first: int,
    warm_up: int,
    steps: int,
    seconds: float,
    memory_gib: float | None,
) -> Iterator[dict[str, Any]]:
    """Builds one rank of a job and runs planned steps of it; arguments as of the command.

    Yields:
        As `RehearsalTrainer.run`.

    Raises:
        UserError: the configuration cannot run, or it does not fit.
    """
    from wlb_titan.runtime.train import allow_segments_to_grow

    allow_segments_to_grow()
    become_rank(rank, world_size)
    import torch

    from wlb_titan.runtime.job import device_bytes, job_of, parallel_dims
    from wlb_titan.runtime.lone.rehearsal import RehearsalTrainer
    from wlb_titan.runtime.memory import check_memory
    from wlb_titan.runtime.models.load import load_config

    logging.getLogger().setLevel(logging.ERROR)
    config = load_config(file, overrides, world_size=world_size).config
    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        torch.set_num_threads(1)
    whole = device_bytes()
    memory = whole if memory_gib is None else int(memory_gib * GIB)
    if memory > whole:
        raise UserError(f"--memory-gib: the device has {whole / GIB:.2f} GiB, less than {memory_gib:g}.")
    check_memory(job_of(config, parallel_dims(config, world_size)), memory)
    if memory < whole:
        _limit(memory, whole, on_cpu)
    trainer = RehearsalTrainer(config, rank=rank, world_size=world_size, memory=memory)
    try:
        yield from trainer.run(first, warm_up, steps, seconds)
    finally:
        trainer.close()


def _limit(memory: int, whole: int, on_cpu: bool) -> None:
    """Has an allocation beyond so many bytes fail."""
    if on_cpu:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))
        return
    import torch

    torch.cuda.set_per_process_memory_fraction(memory / whole)


if __name__ == "__main__":
    main()
