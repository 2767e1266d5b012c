"""`wlb-titan config check` and `wlb-titan config show`: what a TOML file means, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from wlb_titan.commands.command_line import (
    OVERRIDABLE,
    OfFile,
    Size,
    load,
    of_file,
    resolved_job,
    world_size_option,
)
from wlb_titan.cost.degrees import Degrees
from wlb_titan.job import Policy


@click.group()
def config() -> None:
    """Check a TOML configuration, or show it resolved.

    A value given on the command line (--training.steps 5) goes over the TOML file, the file over the one that
    it extends, and all of them over the base that the file names.
    """


@config.command(cls=OfFile, context_settings=OVERRIDABLE)
@of_file
@world_size_option
@click.option(
    "--device-gib",
    type=Size(),
    metavar="GIB",
    help="Memory of a device, which the job is predicted to fit or refused.",
)
def check(file: Path, overrides: tuple[str, ...], world_size: int | None, device_gib: float | None) -> None:
    """Check that FILE, with overrides, is a configuration that can run.

    Prints one line with the essential numbers, or one paragraph that says what is wrong, with exit code 2.
    The corpus must be there; GPUs are not looked at.
    """
    job, resolved = resolved_job(file, overrides, world_size)
    from wlb_titan.runtime.checks import validate_files
    from wlb_titan.runtime.memory import check_memory

    resolved.check(lambda config: validate_files(config, world_size))
    if device_gib is not None:
        resolved.check(lambda _: check_memory(job, int(device_gib * 2**30)))
    click.echo(f"OK {file}: {summary(resolved.config, job.degrees, world_size)}")


@config.command(cls=OfFile, context_settings=OVERRIDABLE)
@of_file
@click.option("--changed", is_flag=True, help="Only the values that were written, not those of the base.")
def show(file: Path, overrides: tuple[str, ...], changed: bool) -> None:
    """Show all values of FILE, with overrides, and where each came from.

    The output is itself a TOML file that loads to the same configuration. Its comments name each value's
    place: the base, a file and its line, the command line, or the default of a class that the file chose.
    """
    click.echo(load(file, overrides).to_toml(changed_only=changed), nl=False)


def summary(config: Any, degrees: Degrees, world_size: int | None) -> str:
    """The essential numbers of a configuration in one line."""
    from wlb_titan.runtime.attention.implementation import on_devices
    from wlb_titan.runtime.train import allocator

    open_degree = world_size is None and config.parallelism.data_parallel_shard_degree == -1
    wlb, epochs = config.wlb, config.wlb.epochs
    length = f"{epochs} epoch{'s' * (epochs > 1)}" if epochs else f"{config.training.steps} steps"
    return (
        f"model {config.model_spec.name} {config.model_spec.flavor}, {degrees} = {degrees.ranks} processes"
        f"{' or a multiple' if open_degree else ''}, seq_len {config.training.seq_len}, {length}, "
        f"policy {Policy(wlb.packing.name, wlb.context.name, wlb.pipeline.name)}, "
        f"attention {on_devices(config)}{'' if wlb.device == 'cpu' else f', allocator {allocator()}'}"
    )
