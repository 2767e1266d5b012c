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
from typing import TYPE_CHECKING, NamedTuple

from wlb_titan.commands.charts import PALETTE
from wlb_titan.commands.options import writing
from wlb_titan.summary import Estimate

if TYPE_CHECKING:
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

    Args:
        answer: one sentence.
        about: small print below it.
        cards: in the palette's order.
        sections: as `section` makes them.
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
        f'<div class="card" style="--its: {PALETTE[number % len(PALETTE)]}"><b>{_safe(card.name)}</b>'
        f"<strong>{_safe(figure)} <small>{error}</small></strong>{facts}</div>"
    )


def section(title: str, text: str, *bodies: str) -> str:
    """A titled box: a plain text, and the HTML of a table, or of charts, side by side where there is room;
    nothing where all of these are empty."""
    shown = [body for body in bodies if body]
    body = f'<div class="charts">{"".join(shown)}</div>' if len(shown) > 1 else "".join(shown)
    return f"<section><h2>{html.escape(title)}</h2><p>{_safe(text)}</p>{body}</section>" if shown else ""


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same headings, on a phone a list each; nothing where there is none."""
    if not rows:
        return ""
    top = "".join(f"<th>{_safe(heading)}</th>" for heading in rows[0])
    body = "".join(f"<tr>{''.join(_cell(*one) for one in row.items())}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _cell(heading: str, cell: str) -> str:
    kind = ' class="text"' if len(cell) > 40 else ""
    return f'<td data-label="{html.escape(heading)}"{kind}>{_safe(cell)}</td>'


def choice_section(choice: Choice) -> str:
    """What `auto` stands for, and the predictions of all that it may."""
    return section("Choosing", " ".join(choice.remarks()), table(choice.rows()))


def described(job: Job, documents: Documents) -> tuple[str, str]:
    """The corpus' name without its folder, as people share pages, and the job and documents in words."""
    from wlb_titan.commands.job import describe_job

    name = Path(documents.name).name
    return name, describe_job(job, replace(documents, name=name))


def command(name: str, typed: Sequence[str], *more: str) -> str:
    """A command for the same job, to be called in this folder; paths of files in it are relative.

    Args:
        typed: a TOML file, and overrides and options that the command has too.
    """
    below = f"{Path.cwd()}/"
    return shlex.join(["wlb-titan", name, *(word.removeprefix(below) for word in typed), *more])


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


def gained(best: str, ratio: Estimate, base: str, what: str = "FLOPs") -> str:
    """What the best gains over the baseline: the first half of a sentence."""
    if best == base:
        return f"Nothing here does more {what} a second than {base}"
    return f"{best} does {ratio.text('.2f', 'x')} the {what} a second of {base}{ratio.scatter}"


def cost(bubble: float | None, imbalance: float | None) -> str:
    """What still takes the most time: the second half."""
    if bubble is not None and bubble >= 0.1:
        return f"the largest remaining cost is the pipeline bubble ({bubble:.0%})."
    if imbalance is not None and imbalance >= 1.05:
        return f"the largest remaining cost is the imbalance ({imbalance:.2f})."
    return "balancing has little left to gain."
