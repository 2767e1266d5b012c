"""Arguments and options that several subcommands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from wlb_titan.cost.cluster import shipped
from wlb_titan.documents.lengths import NAMED

OVERRIDABLE = {"ignore_unknown_options": True, "show_default": True}
"""Of a command: options that click does not know are overrides of the configuration and are passed through;
`--help` shows defaults."""

Command = Callable[..., Any]


def of_file(command: Command) -> Command:
    """The arguments `file` and `overrides`."""
    overrides = click.argument(
        "overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--SECTION.KEY VALUE]..."
    )
    return click.argument("file", type=click.Path(path_type=Path))(overrides(command))


def of_job(command: Command) -> Command:
    """What `wlb_titan.commands.job.load_job` takes."""
    options = (
        click.argument(
            "words",
            nargs=-1,
            type=click.UNPROCESSED,
            metavar="[FILE.toml|config.json] [-- --SECTION.KEY VALUE ...]",
        ),
        click.option(
            "--lengths",
            metavar="|".join([*NAMED, "FILE"]),
            help="Documents of these lengths instead of a corpus: a named distribution (docs/simulator.md), "
            "or a text file with one document's length in tokens a line.",
        ),
        click.option(
            "--model",
            metavar="SIZE-WINDOW",
            default="7B-128K",
            help="Without FILE.toml: the row of the paper's Table 1.",
        ),
        click.option(
            "--cluster",
            metavar="NAME|FILE.toml",
            help=f"{', '.join(shipped())} or a file like theirs (docs/simulator.md).  [default: wlb.cluster, "
            "or without FILE.toml h100_roce]",
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
