"""The HTML pages: an answer, cards, what to try next, sections of charts and tables.

A page is one file that opens without a network: the JavaScript of Vega, which draws the charts in the
browser, is in it, as vl-convert carries it.
"""

from __future__ import annotations

import html
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from wlb_titan.commands.errors import writing
from wlb_titan.commands.job import describe_job
from wlb_titan.commands.report.charts import color
from wlb_titan.commands.report.words import WORDS
from wlb_titan.documents import Documents
from wlb_titan.job import Job
from wlb_titan.simulator.choice import Choice

STYLE = Path(__file__).with_name("style.css")
DRAW = """
for (const one of document.querySelectorAll(".chart")) {
  const spec = JSON.parse(one.querySelector("script").textContent);
  vegaEmbed(one, spec, {renderer: "svg", actions: false, tooltip: {theme: "custom"}});
}
"""


class Card(NamedTuple):
    """What matters most of a policy or run: a figure, its ± behind a space, and further lines."""

    name: str
    figure: str
    facts: Sequence[str]


class Try(NamedTuple):
    """What to do next, and the command or the lines of TOML for it."""

    why: str
    command: str


def write_page(
    folder: Path,
    *,
    title: str,
    answer: str,
    about: str = "",
    cards: Sequence[Card],
    tries: Sequence[Try],
    sections: Sequence[str],
) -> Path:
    """Writes `folder`/report.html, and returns its path; the folder is made if it is not there.

    The answer is one sentence, `about` in small print, cards are in the palette's order, and sections as
    `section` makes them.

    Raises:
        UserError: the folder cannot be written to.
    """
    import vl_convert

    bundle = vl_convert.javascript_bundle()  # type: ignore[call-arg]
    commands = "".join(f"<p>{_safe(one.why)}</p><pre>{_safe(one.command)}</pre>" for one in tries)
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_safe(title)}</title><style>{STYLE.read_text()}</style></head><body><main>"
        f'<h1>{_safe(title)}</h1><p class="answer">{_safe(answer)}</p><p class="about">{_safe(about)}</p>'
        f'<div class="cards">{"".join(map(_card, range(len(cards)), cards))}</div>'
        f"<section><h2>Try next</h2>{commands}</section>{''.join(sections)}</main>"
        f"<script>{bundle}</script><script>{DRAW}</script></body></html>\n"
    )
    path = folder / "report.html"
    with writing(f"--report: {path}"):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def _safe(text: str) -> str:
    """As HTML; the names of policies may be broken behind a colon."""
    return html.escape(text).replace(":", ":<wbr>")


def _card(number: int, card: Card) -> str:
    figure, _, error = card.figure.partition(" ")
    facts = "".join(f"<span>{_safe(fact)}</span>" for fact in card.facts if fact)
    return (
        f'<div class="card" style="--its: {color(number)}"><b>{_safe(card.name)}</b>'
        f"<strong>{_safe(figure)} <small>{error}</small></strong>{facts}</div>"
    )


def section(title: str, text: str, *bodies: str) -> str:
    """A titled box: a plain text, and the HTML of a table, or of charts, side by side where there is room;
    nothing where all of these are empty."""
    shown = [body for body in bodies if body]
    body = f'<div class="charts">{"".join(shown)}</div>' if len(shown) > 1 else "".join(shown)
    return f"<section><h2>{html.escape(title)}</h2><p>{_safe(text)}</p>{body}</section>" if shown else ""


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same headings, on a phone a list each; words that are known are explained."""
    headings = list(rows[0])
    known = [word for word in (*headings, *(row[headings[0]] for row in rows)) if word in WORDS]
    top = "".join(f"<th>{_explained(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(_cell(*one) for one in row.items())}</tr>" for row in rows)
    words = "".join(f"<dt>{html.escape(word)}</dt><dd>{html.escape(WORDS[word])}</dd>" for word in known)
    explained = f"<details><summary>What the words mean</summary><dl>{words}</dl></details>" if words else ""
    return f"<table><tr>{top}</tr>{body}</table>{explained}"


def _cell(heading: str, cell: str) -> str:
    kind = ' class="text"' if len(cell) > 40 else ""
    return f'<td data-label="{html.escape(heading)}"{kind}>{_explained(cell)}</td>'


def _explained(word: str) -> str:
    return f'<abbr title="{html.escape(WORDS[word])}">{_safe(word)}</abbr>' if word in WORDS else _safe(word)


def described(job: Job, documents: Documents) -> tuple[str, str]:
    """The corpus' name without its folder, as people share pages, and the job and documents in words."""
    name = Path(documents.name).name
    return name, describe_job(job, replace(documents, name=name))


def command(name: str, typed: Sequence[str], *more: str) -> str:
    """A command on what a command line named, which runs in the same folder; paths below it are short.

    Args:
        typed: a TOML file, and overrides and options that the command has too.
    """
    here = f"{Path.cwd()}/"
    return shlex.join(["wlb-titan", name, *(word.removeprefix(here) for word in typed), *more])


def search_command(typed: Sequence[str], gpus: int) -> str:
    """The search for other degrees, which takes none."""
    kept, words = [], iter(typed)
    for word in words:
        key, equals, _ = word.partition("=")
        if key.endswith("_parallel_degree"):
            _ = equals or next(words)
        else:
            kept.append(word)
    return command("simulate", kept, "--search", "--gpus", str(gpus))


def choice_section(choice: Choice) -> str:
    """What `auto` stands for, and the predictions of all that it may."""
    return section("Choosing", " ".join(choice.remarks()), table(choice.rows()))
