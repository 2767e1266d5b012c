"""What several benchmarks share: tables in Markdown, and results."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from wlb_titan import __version__

RESULTS = Path(__file__).parent / "results" / "cpu"


def line(cells: Iterable[str]) -> str:
    """Of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(heads)
    return "\n".join(map(line, [names, ["---"] * len(names), *rows]))


def formatted(columns: dict[str, str], rows: Iterable[dict[str, Any]]) -> str:
    """A table of rows; columns are headings with formats such as "{seconds:.2f}"."""
    return table(columns, (_cells(columns, row) for row in rows))


def show(columns: dict[str, str], rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each printed as soon as it is there."""
    print(table(columns, ()))
    found = []
    for row in rows:
        print(line(_cells(columns, row)), flush=True)
        found.append(row)
    return found


def _cells(columns: dict[str, str], row: dict[str, Any]) -> list[str]:
    return [form.format_map(row) for form in columns.values()]


def machine() -> dict[str, Any]:
    """What times were measured with, and on."""
    return {
        "wlb_titan": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],  # processes that wanted the cores besides
        },
    }


def save(name: str, results: Any, indent: int | None = 1) -> None:
    """Writes RESULTS/name.json."""
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(results, indent=indent) + "\n", encoding="utf-8")
    print(f"wrote {path}", flush=True)


def saved(name: str) -> Any:
    """What RESULTS/name.json has."""
    return json.loads((RESULTS / f"{name}.json").read_text())
