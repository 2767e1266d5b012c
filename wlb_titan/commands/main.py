"""The command `wlb-titan`. Subcommands are imported when they are called, so `--help` answers at once."""

import importlib
from typing import Any, NamedTuple

import click

from wlb_titan import __version__
from wlb_titan.commands.errors import errors_for_the_user
from wlb_titan.errors import UserError


class Subcommand(NamedTuple):
    """Where a subcommand lives, and its line in `wlb-titan --help`."""

    module: str
    attribute: str
    help: str


SUBCOMMANDS = {
    "init": Subcommand("wlb_titan.commands.init", "init", "Write a first experiment for this machine."),
    "prepare": Subcommand("wlb_titan.commands.prepare", "prepare", "Turn text into a corpus to train on."),
    "config": Subcommand(
        "wlb_titan.commands.config", "config", "Check a TOML configuration, or show it resolved."
    ),
    "train": Subcommand("wlb_titan.commands.train", "train", "Train on this machine as a TOML file says."),
    "slurm": Subcommand("wlb_titan.commands.slurm", "slurm", "Write the batch script of a job for Slurm."),
    "plan": Subcommand("wlb_titan.commands.plan", "plan", "Plan the packing of documents without training."),
    "simulate": Subcommand(
        "wlb_titan.commands.simulate", "simulate", "Predict step time and memory of a job on a cluster."
    ),
    "dryrun": Subcommand(
        "wlb_titan.commands.dryrun", "dryrun", "Run a step of a big job on this machine, without its GPUs."
    ),
    "rehearse": Subcommand(
        "wlb_titan.commands.rehearse", "rehearse", "Measure a job of many devices on this one."
    ),
    "compare": Subcommand(
        "wlb_titan.commands.compare", "compare", "Put the metrics of training runs side by side."
    ),
    "sample": Subcommand(
        "wlb_titan.commands.sample", "sample", "Let a trained model go on with a text, to look at."
    ),
    "profile": Subcommand(
        "wlb_titan.commands.profile", "profile", "Measure this device's attention, for planning."
    ),
}


class LazyGroup(click.Group):
    """A group that knows its subcommands by `SUBCOMMANDS` and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        module, attribute, _ = SUBCOMMANDS[cmd_name]
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise UserError(
                f"`wlb-titan {cmd_name}` is not part of this installation of wlb_titan."
            ) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in SUBCOMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        with errors_for_the_user():
            return super().invoke(ctx)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="wlb-titan")
def main() -> None:
    """Workload-balanced long-context training on torchtitan.

    On clusters training is started with TorchX, `torchx run wlb.train --config FILE`, or by `slurm`'s script.
    """


if __name__ == "__main__":
    main()
