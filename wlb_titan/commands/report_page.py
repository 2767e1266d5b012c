"""What the HTML reports share: one page of sections, without anything that it would have to load."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from wlb_titan.errors import PlanError
from wlb_titan.simulator.choice import Choice

STYLE = """
:root { --ink: #20242b; --soft: #5b616b; --line: #e4e7eb; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: var(--ink); font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 0 0 4px; }
p { margin: 0 0 12px; color: var(--soft); max-width: 76ch; }
section { background: #fff; border: 1px solid var(--line); border-radius: 12px; padding: 24px; margin-top: 20px; }
svg { width: 100%; height: auto; display: block; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 16px; margin-top: 24px; }
.card { background: #fff; border: 1px solid var(--line); border-top: 4px solid; border-radius: 12px; padding: 16px 18px; }
.card b { display: block; font-size: 14px; }
.card strong { font-size: 34px; font-weight: 650; letter-spacing: -0.02em; font-variant-numeric: tabular-nums; }
.card span { display: block; font-size: 13px; color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: right; color: var(--soft); font-weight: 500; }
th, td { padding: 7px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
"""  # noqa: E501


@contextmanager
def needs_matplotlib() -> Iterator[None]:
    """Says how to install matplotlib where an import within does not find it.

    Raises:
        PlanError: matplotlib is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise PlanError(
            "A report needs matplotlib. Install it with: pip install 'wlb-titan[report]'"
        ) from error


def write_page(folder: Path, title: str, head: str, sections: Sequence[str]) -> Path:
    """Writes `folder`/report.html.

    Args:
        folder: made if it is not there.
        title: of the window, as plain text.
        head: HTML of the page's top.
        sections: of `section`.

    Returns:
        The page's path.

    Raises:
        PlanError: the folder cannot be written to.
    """
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f"{head}{''.join(sections)}</main></body></html>\n"
    )
    path = folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"The report cannot be written to {folder}: {error.strerror}.") from error
    return path


def section(title: str, text: str, body: str) -> str:
    """A titled box: a plain text and the HTML of a figure or table."""
    return f'<section><h2>{title}</h2><p>{html.escape(text)}</p><div class="scroll">{body}</div></section>'


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same headings."""
    headings = "".join(f"<th>{heading}</th>" for heading in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row.values())}</tr>" for row in rows)
    return f"<table><tr>{headings}</tr>{body}</table>"


def choice_section(choice: Choice) -> str:
    """What `auto` stands for, and the predictions of all that it may."""
    return section("Choosing", " ".join(choice.remarks()), table(choice.rows()))
