"""The HTML pages: an answer, pictures, what to try next, tables.

A page is one file that opens without a network, drawn by the macros of `templates/page.html`. Pictures are
SVG, as wide as there is room; what stands under the pointer is a box's title. Their colours of text and lines
are the page's own variables, so they follow its light and dark look.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from wlb_titan.commands.command_line import Rows, describe_job, writing
from wlb_titan.documents import Documents
from wlb_titan.files import save
from wlb_titan.job import Job, Policy
from wlb_titan.simulator.choice import Choice
from wlb_titan.simulator.measured import NAMES, Pass, bubble
from wlb_titan.summary import Estimate

WAITING = {"slowest CP rank": "#d9806f77", "waiting in the pipeline": "#8b929c77", "waiting": "#8b929c77"}
WAITING |= {"waiting for replicas": "#8b929c44"}
COLORS = (
    {"attention": "#2f5f98", "products": "#4486d1", "element-wise": "#8fb3a5", "head": "#cc932f"}
    | {"tensor parallelism": "#a06cc0", "context parallelism": "#c76f9f", "experts' exchange": "#d95f56"}
    | {"launches": "#6fa64a", "kept states": "#4aa3b5", "forward": "#6aa5de", "loss": "#cc932f"}
    | {"backward": "#2f5f98", "forward and backward": "#4486d1", "backward of inputs": "#2f5f98"}
    | {"backward of weights": "#8fb3a5", "recomputed": "#12967f", "data parallelism": "#6b7480"}
    | {"own dimensions": "#8b929c", "loading": "#c76f9f", "optimizer": "#b59a5b", "rest": "#6b7480"}
    | WAITING
)
"""Parts of a step and passes, in the order of bars, and their colours; one sees through those of waiting."""
Parts = Mapping[str, float]
"""Seconds of a step, as of `Prediction.parts`."""
SHOWN = 0.005  # share of a step from which a part is drawn and named

TRAIN = "To train with this policy, set wlb.policy in the TOML file, or add:"

Curves = Mapping[str, tuple[Iterable[float], Iterable[float]]]
"""By name, the places on the axis and the values."""


@cache
def template(file: str) -> Template:
    """One of the files in `templates/`, of pages and of the files that a user goes on from; what is put into
    HTML is escaped."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=file.endswith(".html"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(file)


def _drawn(macro: str, *values: object) -> str:
    """HTML, escaped and not to be escaped again: what a macro of `page.html` makes of values."""
    drawn: str = getattr(template("page.html").module, macro)(*values)
    return drawn


def write_page(
    folder: Path,
    *,
    title: str,
    answer: str,
    about: str = "",
    sections: Iterable[str],
) -> Path:
    """Writes `folder`/report.html, and returns its path; the folder is made if need be. `answer` is one
    sentence, `about` small print at the end."""
    text = _drawn("page", title, answer, about, sections)
    path = folder / "report.html"
    with writing(f"--report: {path}"):
        save(path, text)
    return path


def section(title: str, text: str, *bodies: str) -> str:
    """A titled box with text and HTML bodies; nothing without bodies."""
    return _drawn("section", title, text, bodies)


def next_section(tries: Sequence[tuple[str, str]]) -> str:
    """What to do next and why, and the command or the lines of TOML for it."""
    return section("Try next", "", _drawn("commands", tries))


def choice_section(choice: Choice) -> str:
    """What `auto` stands for, and the predictions for all candidates."""
    return section("Choosing", " ".join(choice.remarks()), table(choice.rows()))


def table(rows: Rows) -> str:
    """Rows with the same headings; nothing if there are none."""
    return _drawn("table", rows)


def lines(title: str, curves: Curves) -> str:
    """A line for each name; values that are not finite are left out."""
    points = {name: np.array([list(x), list(y)], dtype=float).T for name, (x, y) in curves.items()}
    points = {name: curve[np.isfinite(curve).all(axis=1)] for name, curve in points.items()}
    everything = np.concatenate(list(points.values()))
    if not len(everything):
        return ""
    low, high = everything.min(axis=0), everything.max(axis=0)
    extent = np.where(high > low, high - low, 1)
    shares = {name: ((curve - low) / extent).tolist() for name, curve in points.items()}
    grid = [(share, *map(_figure, low + share * extent)) for share in (0, 0.25, 0.5, 0.75, 1)]
    return _drawn("lines", title, shares, grid)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class Timed(NamedTuple):
    """A policy's or run's step, as pages draw it."""

    parts: Parts  # of its mean step
    speed: float  # FLOPs a second
    passes: Sequence[Pass] = ()  # of one step
    flops: float = 0.0  # of this step; 0: it is not drawn


TIME = "The average rank, {}: a bar is as long as the same FLOPs take, in percent of it, and waiting is pale."
STEP = "{}, on the same scale. A row is a rank, a box a pass of one micro-batch."


def time_sections(steps: Mapping[str, Timed], how: str, which: str) -> list[str]:
    """A bar for each policy or run, and below them the pipelines of those that have passes, on one scale: of
    seconds for the FLOPs of the first one's mean step. The first pipeline is as long as its bar, so that a
    machine's drift is left out. `how` parts are known and `which` steps are drawn is said in words."""
    flops = [step.speed * sum(step.parts.values()) for step in steps.values()][:1]
    drawn = {name: step for name, step in steps.items() if flops and step.flops}
    ends = {name: max(p.end for p in step.passes) / step.flops for name, step in drawn.items()}
    scale = [flops[0] / drawn[name].speed / end for name, end in ends.items()][:1]
    lengths = [flops[0] / step.speed for step in steps.values()] + [scale[0] * end for end in ends.values()]
    longest = max(lengths, default=0.0)
    widths = {name: longest * step.flops / scale[0] for name, step in drawn.items()}
    picture = bars(steps, flops[0], longest) if steps else ""
    return [
        section("Where a step's time goes", TIME.format(how), picture),
        section("A step", STEP.format(which), pipelines({n: s.passes for n, s in drawn.items()}, widths)),
    ]


def pipelines(timelines: Mapping[str, Sequence[Pass]], widths: Mapping[str, float]) -> str:
    """A step's passes to scale: a picture, so many seconds wide, for each policy or run, a row for each rank,
    a box for each pass with its micro-batch where there is room."""
    pictures = []
    for name, step in timelines.items():
        ranks = sorted({p.rank for p in step}, key=lambda rank: (len(rank), rank))  # pp 2 before pp 10
        passes = [(NAMES.get(p.kind, p.kind), ranks.index(p.rank), p) for p in step]
        colors = {part: color for part, color in COLORS.items() if part in {name for name, *_ in passes}}
        pictures.append((f"{name}: {bubble(step):.1%} bubble", widths[name], ranks, colors, passes))
    return _drawn("pipelines", pictures)


def bars(steps: Mapping[str, Timed], flops: float, longest: float) -> str:
    """A bar for each policy or run, below its name, in boxes with the share of each part in percent; the
    picture is `longest` seconds wide."""
    boxes, names = [], []
    for row, (name, step) in enumerate(steps.items()):
        begin, seconds, whole = 0.0, flops / step.speed, sum(step.parts.values())
        for part in filter(step.parts.get, COLORS):
            share = step.parts[part] / whole
            if share >= SHOWN:
                boxes.append((part, 2 * row + 1, Pass("", 0, round(100 * share), begin, share * seconds)))
            begin += share * seconds
        names += [f"{name}, {seconds:.2f} s", ""]
    colors = {part: color for part, color in COLORS.items() if part in {box[0] for box in boxes}}
    return _drawn("pipelines", [("Seconds for the same FLOPs", longest, names, colors, boxes)])


def in_parts(policy: Policy, parts: Parts) -> str:
    """What a policy's step goes to, in words."""
    whole = sum(parts.values())
    shares = sorted(((seconds / whole, part) for part, seconds in parts.items()), reverse=True)
    named = [f"{part} {share:.1%}" for share, part in shares if share >= SHOWN]
    return f"Of {policy}'s step: {', '.join(named)}."


def described(job: Job, documents: Documents) -> str:
    """The job and documents in words, without the corpus' folder, as pages are shared."""
    return describe_job(job, replace(documents, name=Path(documents.name).name))


def try_next(name: str, typed: Sequence[str], *more: str) -> str:
    """A command for the same job, to be called in this folder; paths in it are relative. `typed` is a TOML
    file, with overrides and options that the command has too."""
    below = f"{Path.cwd()}/"
    return shlex.join(["wlb-titan", name, *(word.removeprefix(below) for word in typed), *more])


def gained(best: str, ratio: Estimate, base: str, what: str = "FLOPs") -> str:
    """The first half of a sentence: what the best gains over the baseline."""
    if best == base:
        return f"Nothing here does more {what} a second than {base}"
    return f"{best} does {ratio.text('.2f', 'x')} the {what} a second of {base}{ratio.scatter}"


def waits(steps: Mapping[str, Timed], best: str, base: str) -> str:
    """The second half: how much of a step is waiting, and how much it was, where both are known."""
    if not {best, base} <= steps.keys():
        return "."
    parts = [steps[name].parts for name in (best, base)]
    now, before = (sum(of[name] for name in WAITING.keys() & of.keys()) / sum(of.values()) for of in parts)
    return f"; ranks wait {now:.0%} of a step" + (f" instead of {before:.0%}." if best != base else ".")
