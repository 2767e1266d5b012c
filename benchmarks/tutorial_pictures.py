"""The pictures of docs/tutorial.md, cut out of the reports that its commands draw.

    python benchmarks/tutorial_pictures.py

takes outputs/tutorial/{plan,simulated}/report.html and writes docs/tutorial/*.svg.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = {
    "plan": ("plan", "Work of every micro-batch"),
    "delay": ("plan", "Delay"),
    "timeline": ("simulated", "Timeline of a typical step"),
}
"""Picture: the report that it is in, and the title of its section."""


def main() -> None:
    folder = ROOT / "docs" / "tutorial"
    folder.mkdir(exist_ok=True)
    for name, (report, title) in PICTURES.items():
        page = (ROOT / "outputs" / "tutorial" / report / "report.html").read_text()
        found = re.search(rf"<h2>{title}</h2>.*?(<svg.*?</svg>)", page, re.DOTALL)
        if found is None:
            raise SystemExit(f"The report {report} has no picture of {title!r}.")
        white = found[1].replace("<svg ", '<svg style="background: white" ', 1)
        (folder / f"{name}.svg").write_text(white + "\n")
        print(f"docs/tutorial/{name}.svg")


if __name__ == "__main__":
    main()
