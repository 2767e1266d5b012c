"""Arguments and options that several subcommands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from wlb_titan.cost.cluster import shipped
from wlb_titan.documents.lengths import NAMED
from wlb_titan.errors import ConfigError

OVERRIDABLE = {"ignore_unknown_options": True, "show_default": True}
"""Of a command: options that click does not know are overrides of the configuration and are passed through;
`--help` shows defaults."""

Command = Callable[..., Any]


class TomlFile(click.Path):
    """A file that is there, which is seen before torch is imported; raises ConfigError if it is not."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if str(value).startswith("--"):
            raise ConfigError(
                f"{value}: the file comes first, without an option's name: {ctx.command_path} FILE "
                "[--SECTION.KEY VALUE]..."
            )
        if not Path(value).exists():
            raise ConfigError(f"{value}: there is no file {value}.")
        return super().convert(value, param, ctx)


def of_file(command: Command) -> Command:
    """The arguments `file` and `overrides`."""
    overrides = click.argument(
        "overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--SECTION.KEY VALUE]..."
    )
    return click.argument("file", type=TomlFile(), metavar="FILE")(overrides(command))


def of_job(command: Command) -> Command:
    """What `wlb_titan.commands.job.load_job` takes."""
    options = (
        of_file,
        click.option(
            "--lengths",
            metavar="|".join([*NAMED, "FILE"]),
            help="Documents of these lengths instead of a corpus: a named distribution (docs/simulator.md), "
            "or a text file with one document's length in tokens a line.",
        ),
        click.option(
            "--cluster",
            metavar="NAME|FILE.toml",
            help=f"{', '.join(shipped())} or a file like theirs (docs/simulator.md).  [default: wlb.cluster]",
        ),
        click.option("--gpus", type=click.IntRange(1, 1 << 20), help="GPUs of the job."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def steps_option(default: int, what: str) -> Callable[[Command], Command]:
    """`--steps`, how many are planned or simulated."""
    return click.option("--steps", type=click.IntRange(1, 1 << 20), default=default, help=what)


report_option = click.option(
    "--report", type=click.Path(path_type=Path), metavar="DIR", help="Draw DIR/report.html."
)
json_option = click.option(
    "--output", type=click.Path(path_type=Path), metavar="FILE.json", help="Write the results as JSON."
)
