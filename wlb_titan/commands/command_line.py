"""What subcommands share: arguments and options, the job that they name, and what is printed.

torch, torchtitan and rich are imported where they are needed: `--help` and mistakes in arguments need none.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from wlb_titan.cost.cluster import shipped
from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import NAMED, named_or_read
from wlb_titan.errors import ConfigError, PlanError, UserError
from wlb_titan.files import save
from wlb_titan.job import Job, Policy
from wlb_titan.plan import Plan
from wlb_titan.progress import Progress
from wlb_titan.runtime.models.load import Loaded, load_config
from wlb_titan.simulator.choice import Choice
from wlb_titan.toml.sources import COMMAND_LINE

NUMBER = click.IntRange(0)
POSITIVE = click.IntRange(1)
MANY = click.IntRange(1, 1 << 20)

Command = Callable[..., Any]
Rows = list[dict[str, str]]
"""A table: cells by heading, with the same headings in every row."""


class Size(click.FloatRange):
    """A number above zero; NaN, which passes every range, is none."""

    def __init__(self) -> None:
        super().__init__(0, min_open=True)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is not a size.", param, ctx)


class TomlFile(click.Path):
    """An existing file, checked before torch is imported, or one that comes with wlb_titan, by its name."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not Path(value).exists():
            for folder in Path(__file__).parents[1:3]:  # of an installation, of a checkout
                if (shipped := folder / "train_configs" / f"{value}.toml").is_file():
                    return shipped
            raise ConfigError(
                f"{value}: there is no such file. Give the file first, or after --config: {ctx.command_path} "
                "FILE [--SECTION.KEY VALUE]..."
            )
        return super().convert(value, param, ctx)


class Place(click.Path):
    """A path, which is not empty."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if str(value) in ("", "-"):
            raise UserError(
                f"{param.opts[0]}: name a {'file' if self.file_okay else 'folder'}; got {value!r}."
            )
        return super().convert(value, param, ctx)


class Output(Place):
    """A file, or a `file` in a folder, written at the end. It is refused at the start if it cannot be
    written, or if it is there and does not begin as such files do: it is somebody else's. Files that users
    edit begin in no way that says so."""

    def __init__(self, *begins: str, file: str = "") -> None:
        super().__init__(path_type=Path, dir_okay=bool(file), file_okay=not file, writable=True)
        self._begins, self._file = begins, file

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        path: Path = super().convert(value, param, ctx)
        self._check_kind(path / self._file, param.opts[0])
        place = path.absolute().parent
        while self._file and not place.exists():
            place = place.parent
        if not os.access(place, os.W_OK):
            raise UserError(
                f"{param.opts[0]}: {path} cannot be written: there is no folder {place} to write to."
            )
        return path

    def _check_kind(self, file: Path, option: str) -> None:
        if not file.is_file():  # not there, or a device
            return
        with writing(f"{option}: {file}"), file.open("rb") as opened:
            begin = opened.read(max(map(len, self._begins), default=1))
        if begin and not any(begin.startswith(text.encode()) for text in self._begins):
            foreign = ", and this command did not write it" if self._begins else ""
            raise UserError(f"{option}: {file} exists{foreign}. Remove it, or name another file.")


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turns an OSError into an error that names what could not be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be written: {error.strerror}.") from error


def write_json(output: Path, results: Any) -> None:
    with writing(f"--output: {output}"):
        save(output, results, indent=1)


class OfFile(click.Command):
    """A command about a TOML file, which may come as `--config FILE` too, as `wlb.train` has it. After all
    arguments, options unknown to click are overrides of the configuration; `--help` shows defaults."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings = {"ignore_unknown_options": True, "show_default": True}
        file = click.Argument(["file"], type=TomlFile(path_type=Path), metavar="FILE")
        metavar = "[--SECTION.KEY VALUE]..."
        words = click.Argument(["overrides"], nargs=-1, type=click.UNPROCESSED, metavar=metavar)
        self.params = [file, *self.params, words]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = [name for parameter in self.params for name in parameter.opts]
        for place, word in enumerate(args):
            name, given, file = word.partition("=")
            near = difflib.get_close_matches(name, options, n=1, cutoff=0.75)
            if near and name not in options and name.startswith("--") and "." not in name:
                raise click.NoSuchOption(name, possibilities=near, ctx=ctx)
            if name == "--config" and (given or len(args) > place + 1):
                rest = args[place + 1 :] if given else args[place + 2 :]
                args = [file if given else args[place + 1], *args[:place], *rest]
                break
        return super().parse_args(ctx, args)


world_size_option = click.option(
    "--world-size",
    type=MANY,
    metavar="N",
    help="GPUs of the job; by default as many as the configured degrees need.",
)


def of_job(command: Command) -> Command:
    """Options that `load_job` takes."""
    lengths = click.option(
        "--lengths",
        metavar="|".join([*NAMED, "FILE"]),
        help="Documents of these lengths instead of a corpus: a named distribution (docs/simulator.md), "
        "or a text file with one length in tokens per line.",
    )
    cluster = click.option(
        "--cluster",
        metavar="NAME|FILE.toml",
        help=f"{', '.join(shipped())} or a file like theirs (docs/simulator.md).  [default: wlb.cluster]",
    )
    return world_size_option(lengths(cluster(command)))


def policies_option(default: str) -> Callable[[Command], Command]:
    def parsed(ctx: click.Context, param: click.Parameter, text: str | None) -> list[Policy] | None:
        try:
            return None if text is None else list(map(Policy.parse, text.split(",")))
        except UserError as error:
            raise UserError(f"--policies {text}: {error}.") from error

    about = f"Policies to compare, as in wlb.policy; the first is the baseline.  [default: {default}]"
    return click.option("--policies", callback=parsed, metavar="POLICY,...", help=about)


report_option = click.option(
    "--report",
    type=Output('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">', file="report.html"),
    metavar="DIR",
    help="Write the page DIR/report.html.",
)
json_option = click.option(
    "--output",
    type=Output('[\n {\n  "rank": ', '{\n "file": '),
    metavar="FILE.json",
    help="Write the results as JSON.",
)


@dataclass(frozen=True)
class Asked:
    """What a command line names."""

    job: Job
    documents: Documents
    loaded: Loaded
    lengths: str | None = None
    world_size: int | None = None

    @property
    def typed(self) -> tuple[str, ...]:
        """All of this as words of a command line, for other commands."""
        lengths = () if self.lengths is None else ("--lengths", self.lengths)
        ranks = () if self.world_size is None else ("--world-size", str(self.world_size))
        return str(self.loaded.file), *self.loaded.overrides, *lengths, *ranks

    def plans(self, steps: int, after: int) -> list[Plan]:
        """Those of `steps` steps, after the first `after`."""
        with progress() as report:
            return self.job.plans(self.documents, steps, after, report)

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Says in an error from planning where the setting that it blames was written."""
        try:
            yield
        except ConfigError:
            raise
        except UserError as error:
            if not error.setting:
                raise
            if error.setting == "corpus.path" and self.lengths is not None:
                raise PlanError(f"--lengths: {error}") from error
            raise ConfigError(self.loaded.placed(error)) from error


def load_job(
    file: Path,
    overrides: Sequence[str] = (),
    *,
    lengths: str | None = None,
    cluster: str | None = None,
    world_size: int | None = None,
) -> Asked:
    """What a command's arguments name. `lengths` and `cluster` replace the file's."""
    from wlb_titan.config.documents import training_documents

    words = [*overrides, *(("--wlb.cluster", cluster) if cluster is not None else ())]
    loaded = load(file, words, world_size)
    job = loaded.told(loaded.job)
    if lengths is None:
        documents = loaded.check(lambda config: training_documents(config.wlb))
    else:
        document_lengths, name = named_or_read(lengths)
        given = loaded.provenance["wlb.corpus.seed"] == COMMAND_LINE
        seed = loaded.config.wlb.corpus.seed if given else None
        documents = Documents(lengths=document_lengths, name=name, seed=seed)
    return Asked(job, documents, loaded, lengths, world_size)


def load(file: Path, overrides: Sequence[str] = (), world_size: int | None = None) -> Loaded:
    """The configuration of a file with overrides; on a terminal it says what takes the seconds."""
    from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

    with progress() as report:
        report("Importing torchtitan", 0, 0)
        use_cpu_without_accelerator()
        return load_config(file, overrides, world_size)


def describe_job(job: Job, documents: Documents) -> str:
    """A line on the corpus, one on the job, and one for each source of a mixture."""
    head, *sources = documents.describe(job.window, job.micro_batches * job.window)
    pipeline = f", {job.schedule}" if job.degrees.pipeline > 1 else ""
    line = (
        f"{head} {job.micro_batches} micro-batches a step, context window {job.window:,} tokens, "
        f"{job.degrees} = {job.degrees.ranks} ranks{pipeline}, {job.checkpointing}, on "
        f"{job.cluster.name}. Work by {job.packing.cost_model}."
    )
    return "\n".join([line, *sources])


WIDE = 100_000  # characters, so that tables stay whole
LEFT = ("policy", "sharding", "chosen", "degrees", "memory", "collective", "over", "setting", "figure", "")
"""Headings of words, aligned left; figures are aligned right."""


def say(*lines: str) -> None:
    for line in lines:
        click.echo(line)


@contextmanager
def progress() -> Iterator[Progress]:
    """Draws what it is told as a bar, with its rate and the time that is left, and removes it at the end.
    Nothing is drawn where stderr is no terminal. Print to stdout before or after it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True, force_terminal=sys.stderr.isatty())
    columns = ("{task.description}", BarColumn(10), TimeElapsedColumn(), "{task.fields[pace]}")
    hidden = not console.is_interactive
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=hidden) as bar:

        def report(what: str, done: int, total: int) -> None:
            if [task.description for task in bar.tasks] != [what]:
                for former in bar.task_ids:
                    bar.remove_task(former)
                bar.add_task(what, total=total or None, pace="")
            (task,) = bar.tasks
            pace, seconds = "", task.elapsed
            if done and total and seconds:
                rate, left = done / seconds, timedelta(seconds=round(seconds * (total / done - 1)))
                pace = f"{done:,} of {total:,}, {rate:,.{0 if rate >= 10 else 2}f}/s, {left} left"
            first = pace and not task.fields["pace"]  # is drawn at once, and then ten times a second
            bar.update(task.id, completed=done, total=total or None, pace=pace, refresh=bool(first))

        yield report


def show_table(rows: Rows) -> None:
    """Prints a table, whole also where a terminal has less room."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    for heading in rows[0]:
        table.add_column(Text(heading), justify="left" if heading in LEFT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row.values()))  # as they are: brackets are no markup
    Console(width=WIDE, highlight=False).print(table)


def print_choice(choice: Choice) -> None:
    """Prints what `auto` stands for, and the predictions for all candidates."""
    show_table(choice.rows())
    say(*choice.remarks())
