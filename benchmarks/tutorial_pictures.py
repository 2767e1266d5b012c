"""The pictures of docs/tutorial.md, cut out of the pages that its commands draw.

    python benchmarks/tutorial_pictures.py

takes outputs/tutorial/{plan,simulated}/report.html and writes docs/tutorial/*.svg.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import vl_convert

ROOT = Path(__file__).parents[1]
PICTURES = {
    "plan": ("plan", "Work of every micro-batch"),
    "delay": ("plan", "Delay"),
    "timeline": ("simulated", "A typical step"),
}
"""Picture: the page that it is in, and the title of its section."""
LIGHT = {"var(--soft)": "#5b616b", "var(--ink)": "#20242b", "var(--line)": "#e1e4e9", "var(--box)": "#fff"}


def main() -> None:
    folder = ROOT / "docs" / "tutorial"
    for name, (report, title) in PICTURES.items():
        page = (ROOT / "outputs" / "tutorial" / report / "report.html").read_text()
        section = re.search(rf"<h2>{title}</h2>.*?</section>", page, re.DOTALL)
        if section is None:
            raise SystemExit(f"The report {report} has no section {title!r}.")
        charts = re.findall(r"<figcaption>(.*?)</figcaption>.*?json\">(.*?)</script>", section[0])
        svg = vl_convert.vegalite_to_svg(_together(charts))
        (folder / f"{name}.svg").write_text(svg + "\n")
        print(f"docs/tutorial/{name}.svg")


def _together(charts: list[tuple[str, str]]) -> dict:
    """One Vega-Lite specification of charts with their titles, below each other, in the light look."""
    specs = []
    for title, text in charts:
        for variable, colour in LIGHT.items():
            text = text.replace(variable, colour)
        spec = json.loads(text)
        config = spec.pop("config")
        specs.append({**spec, "width": 760, "title": html.unescape(title)})
    config |= {"background": "white", "aria": False}
    config["title"] = {"anchor": "start", "fontSize": 13}
    return {"vconcat": [{k: v for k, v in one.items() if k != "autosize"} for one in specs], "config": config}


if __name__ == "__main__":
    main()
