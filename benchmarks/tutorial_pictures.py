"""The pictures of docs/tutorial.md, cut out of the pages that its commands write.

    python benchmarks/tutorial_pictures.py

takes outputs/tutorial/{plan,simulated}/report.html and writes docs/tutorial/*.svg.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = {"plan": "plan", "timeline": "simulated"}
"""Picture: the page that it is in."""
TITLE, CAPTION, GAP, WIDTH = 20, 48, 18, 760  # pixels


def main() -> None:
    for name, report in PICTURES.items():
        page = (ROOT / "outputs" / "tutorial" / report / "report.html").read_text()
        path = ROOT / "docs" / "tutorial" / f"{name}.svg"
        path.write_text(picture(page) + "\n")
        print(path.relative_to(ROOT))


def picture(page: str) -> str:
    """A page's pictures below each other, with their captions and the page's style."""
    (style,) = re.findall(r"<style>.*?</style>", page, re.DOTALL)
    top, shapes = 0, []
    figure = r'<figcaption>(.*?)</figcaption><svg width="100%" height="(\d+)" role="img">(.*?)</svg></figure>'
    for caption, height, svg in re.findall(figure, page, re.DOTALL):
        title, _, names = caption.partition("<span>")
        colours = re.findall(r'<i style="background: (.*?)"></i>(.*?)</span>', names)
        marks = "".join(f'<tspan style="fill: {colour}">■</tspan> {name} ' for colour, name in colours)
        shapes.append(f'<text y="{top + 14}">{title}</text><text y="{top + 14 + TITLE}">{marks}</text>')
        shapes.append(f'<svg y="{top + CAPTION}" width="100%" height="{height}">{svg}</svg>')
        top += CAPTION + int(height) + GAP
    size = f'width="{WIDTH}" height="{top}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{"".join(shapes)}</svg>'


if __name__ == "__main__":
    main()
