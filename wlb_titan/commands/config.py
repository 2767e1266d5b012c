"""`wlb-titan config check` and `wlb-titan config show`: what a TOML file means, without running it; and
`wlb-titan init`: a first experiment for the machine at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from wlb_titan.commands import command_line as cli
from wlb_titan.commands.page import template
from wlb_titan.errors import UserError
from wlb_titan.files import save
from wlb_titan.job import Job
from wlb_titan.runtime.one_rank import at_once
from wlb_titan.toml.values import to_text


@click.group()
def config() -> None:
    """Check a TOML configuration, or show it resolved.

    Command-line values (--training.steps 5) override the TOML file, the file overrides those that it extends,
    and they override the base.
    """


@config.command(cls=cli.OfFile)
@cli.world_size_option
@click.option(
    "--device-gib",
    type=cli.Size(),
    metavar="GIB",
    help="Refuse the job unless it is predicted to fit a device with this much memory.",
)
def check(file: Path, overrides: tuple[str, ...], world_size: int | None, device_gib: float | None) -> None:
    """Check that FILE, with overrides, is a configuration that can run.

    Prints one line with the essential numbers, or one paragraph that says what is wrong, with exit code 2.
    Needs the corpus, but no GPUs.
    """
    loaded = cli.load(file, overrides, world_size)
    job = loaded.told(loaded.job)
    from wlb_titan.runtime.checks import validate_files
    from wlb_titan.runtime.memory import check_memory

    loaded.check(lambda config: validate_files(config, job))
    if device_gib is not None:
        loaded.check(lambda _: check_memory(job, int(device_gib * 2**30)))
    click.echo(f"OK {file}: {summary(loaded.config, job, world_size)}")


@config.command(cls=cli.OfFile)
@click.option("--changed", is_flag=True, help="Only values from files and the command line.")
@click.option("--explain", is_flag=True, help="Explain each key above its value.")
def show(file: Path, overrides: tuple[str, ...], changed: bool, explain: bool) -> None:
    """Show all values of FILE, with overrides, and where each came from.

    The output is a TOML file that loads to the same configuration. Its comments name each value's origin:
    the base, a file and its line, the command line, or the default of a class that the file chose.
    """
    click.echo(cli.load(file, overrides).to_toml(changed, explain), nl=False)


def summary(config: Any, job: Job, world_size: int | None) -> str:
    """The essential numbers of a configuration in one line."""
    from wlb_titan.runtime.attention.implementation import on_devices
    from wlb_titan.runtime.train import allocator

    open_degree = world_size is None and config.parallelism.data_parallel_shard_degree == -1
    wlb, epochs, degrees = config.wlb, config.wlb.epochs, job.degrees
    length = f"{epochs} epoch{'s' * (epochs > 1)}" if epochs else f"{config.training.steps} steps"
    return (
        f"model {config.model_spec.name} {config.model_spec.flavor}, {degrees} = {degrees.ranks} processes"
        f"{' or a multiple' if open_degree else ''}, seq_len {config.training.seq_len}, {length}, "
        f"policy {job.policy}, attention {on_devices(config)}"
        f"{'' if wlb.device == 'cpu' else f', allocator {allocator()}'}"
    )


@click.command()
@click.argument("file", type=cli.Place(path_type=Path), default=Path("job.toml"))
@click.option(
    "--corpus", type=cli.Place(), default="outputs/corpus", show_default=True, help="Training corpus."
)
def init(file: Path, corpus: str) -> None:
    """Write a first experiment to FILE (job.toml), which trains on this machine as is; edit it then.

    It trains a small model on all GPUs that torch finds, or on the CPU, in a few minutes.
    """
    if file.exists():
        raise UserError(f"{file} already exists; name another file.")
    import torch

    text = experiment(str(file), corpus, torch.accelerator.device_count(), at_once())
    with cli.writing(str(file)):
        save(file, text)
    click.echo(f"{file} is written. Next:\n")
    if not Path(corpus).exists():
        click.echo(f"  wlb-titan prepare {corpus} --max-tokens 4000000    # this machine's Python files")
    click.echo(f"  wlb-titan config check {file}")
    click.echo(f"  wlb-titan train {file}")


def experiment(file: str, corpus: str, gpus: int, cores: int) -> str:
    """The text of a first experiment; `cores`, of `at_once`, count where there is no GPU."""
    # A step's 8 micro-batches divide over 1, 2, 4 or 8 processes.
    processes = max(number for number in (1, 2, 4, 8) if number <= max(gpus or min(cores, 4), 1))
    return template("first.toml").render(file=file, corpus=to_text(corpus), processes=processes, gpus=gpus)
