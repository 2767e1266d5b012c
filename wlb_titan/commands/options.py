"""Arguments and options that several subcommands have, and whether what they name can be written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from wlb_titan.cost.cluster import shipped
from wlb_titan.documents.lengths import NAMED
from wlb_titan.errors import ConfigError, UserError

OVERRIDABLE = {"ignore_unknown_options": True, "show_default": True}
"""Settings of a command: options that click does not know are overrides of the configuration and are passed
through; `--help` shows defaults."""

Command = Callable[..., Any]


class TomlFile(click.Path):
    """A file that is there, which is seen before torch is imported."""

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


def check_outputs(**places: Path | None) -> None:
    """Refuses, before anything is done, what could not be written at the end.

    Args:
        places: by option; the folder of `report` is made at the end, those of other files must be there.
    """
    for option, path in places.items():
        if path is None:
            continue
        if option == "report" and find_spec("vl_convert") is None:
            raise UserError("A report needs vl-convert. Install it with: pip install 'wlb-titan[report]'")
        with writing(f"--{option}: {path}"):
            place = path.absolute()
            while option == "report" and not place.exists():
                place = place.parent
            if option != "report" and not place.parent.is_dir():
                raise NotADirectoryError(0, f"there is no folder {path.parent}")
            if place.exists() and place.is_dir() != (option == "report"):
                raise FileExistsError(0, f"{place} is a {'folder' if place.is_dir() else 'file'}")
            if not os.access(place if place.exists() else place.parent, os.W_OK):
                raise PermissionError(0, "this user may not write there")


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Says what could not be written where the file system refuses it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be written: {error.strerror}.") from error
