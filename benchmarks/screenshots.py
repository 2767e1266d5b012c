"""Screenshots of the pages that commands write, for the docs: docs/images/*.png.

    apt-get install chromium
    make train
    wlb-titan simulate train_configs/llama2_7b_128k.toml --report outputs/tutorial/simulated \
        --policies plain,fixed_greedy,wlb/adaptive,wlb_lazy/hybrid/best
    python benchmarks/screenshots.py

takes outputs/compare/report.html of `make train` and the page of that prediction, both from their top.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
PAGES = {"compare": ("outputs/compare", 1300), "simulated": ("outputs/tutorial/simulated", 1300)}
"""Picture: the folder of its page, and how many pixels of its height are shown."""

WIDTH, SCALE = 900, 1.5
COLOURS = 64  # of the palette: a page has few, and the rest are the edges of letters
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit("error: there is no Chromium here; apt-get install chromium")
    for name, (folder, height) in PAGES.items():
        path = ROOT / "docs" / "images" / f"{name}.png"
        shoot(browser, ROOT / folder / "report.html", height, path)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def shoot(browser: str, page: Path, height: int, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        words = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--force-device-scale-factor={SCALE}"]
        words += [f"--user-data-dir={folder}", f"--window-size={WIDTH},{height}", f"--screenshot={shot}"]
        subprocess.run([browser, *words, page.resolve(strict=True).as_uri()], check=True)
        with Image.open(shot) as image:
            image.convert("RGB").quantize(COLOURS).save(path, optimize=True)


if __name__ == "__main__":
    main()
