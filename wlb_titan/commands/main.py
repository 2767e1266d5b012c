"""The command `wlb-titan`. Subcommands are imported when they are called, so `--help` answers at once.

This is the one place where an exception becomes what the user reads: a `UserError` or a full disk becomes one
paragraph on stderr and exit code 2, a warning one line, Ctrl-C one line and exit code 130. Anything else is a
defect and keeps its traceback.
"""

import errno
import importlib
import io
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import click

from wlb_titan import __version__
from wlb_titan.errors import EXIT_USER_ERROR, UserError, drop_peers_warnings

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

SUBCOMMANDS = {
    "init": ("config", "Write a first experiment for this machine."),
    "prepare": ("prepare", "Turn text into a corpus to train on."),
    "config": ("config", "Check a TOML configuration, or show it resolved."),
    "train": ("launch", "Train on this machine as a TOML file says."),
    "bench": ("launch", "Compare policies that take turns on one model."),
    "slurm": ("launch", "Write the batch script of a job for Slurm."),
    "plan": ("plan", "Plan the packing of documents without training."),
    "simulate": ("simulate", "Predict step time and memory of a job on a cluster."),
    "dryrun": ("dryrun", "Check that a big job builds, steps and fits, on this machine."),
    "rehearse": ("rehearse", "Measure a job of many devices on a single device."),
    "compare": ("compare", "Put the metrics of training runs side by side."),
    "export": ("export", "Write a checkpoint as a Hugging Face model."),
    "profile": ("profile", "Measure this device's attention, for planning."),
}
"""Commands: their modules here, and their lines in `wlb-titan --help`."""


class Refused(click.ClickException):
    """A user's mistake."""

    exit_code = EXIT_USER_ERROR


def tell_once() -> Callable[..., None]:
    """Tells each warning once, as a line without its place in the code."""
    told: set[str] = set()

    def tell(message: Warning | str, *_: Any) -> None:
        if str(message) not in told:
            told.add(str(message))
            click.echo(f"Warning: {message}", err=True)

    return tell


class LazyGroup(click.Group):
    """A group that knows its subcommands by name and imports one only to run it."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        module = importlib.import_module(f"wlb_titan.commands.{SUBCOMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in SUBCOMMANDS.items()])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            click.echo(
                f"Error: {error.filename or 'The output'} cannot be written: {error.strerror}.", err=True
            )
            os._exit(EXIT_USER_ERROR)  # without a last try to write

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # tables have signs that some encodings lack
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = tell_once()
            try:
                return super().invoke(ctx)
            except UserError as error:
                raise Refused(str(error)) from error
            except KeyboardInterrupt:
                click.echo("\nInterrupted.", err=True)
                raise click.exceptions.Exit(EXIT_INTERRUPTED) from None


KNOWN = dict.fromkeys(SUBCOMMANDS, click.Command(None))  # to click, which names the nearest to a misspelt one


@click.group(cls=LazyGroup, commands=KNOWN, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="wlb-titan")
def main() -> None:
    """Workload-balanced long-context training on torchtitan.

    On a cluster, start training with TorchX (`torchx run wlb.train --config FILE`) or the script of `slurm`.
    """
    drop_peers_warnings()


if __name__ == "__main__":
    main()
