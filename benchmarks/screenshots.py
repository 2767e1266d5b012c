"""Screenshots of the pages that the tutorial's commands write, for the docs: docs/images/*.png.

    apt-get install chromium
    wlb-titan prepare outputs/corpus --max-tokens 4000000
    wlb-titan simulate train_configs/llama2_7b_128k.toml --report outputs/tutorial/simulated \
        --policies plain,fixed_greedy,wlb/adaptive,wlb_lazy/hybrid/best
    wlb-titan train train_configs/cpu_pipeline.toml
    wlb-titan train train_configs/cpu_pipeline_slices.toml
    wlb-titan compare outputs/cpu_pipeline outputs/cpu_pipeline_slices --report outputs/tutorial/compare
    python benchmarks/screenshots.py

Where a page gets other sections, the rows of PICTURES have to follow.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
PICTURES = {"simulated": ("simulated", 0, 1180), "measured": ("compare", 1628, 1962)}
"""The folder in outputs/tutorial, and the first and last row of pixels that is shown of its page."""

WIDTH, COLOURS = 900, 32  # a page has few colours; the rest are the edges of letters


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("error: no Chromium is installed. On Debian: apt-get install chromium")
    for name, (folder, first, last) in PICTURES.items():
        path = ROOT / "docs" / "images" / f"{name}.png"
        page = screenshot(browser, ROOT / "outputs" / "tutorial" / folder / "report.html", last)
        page.crop((0, first, WIDTH, last)).quantize(COLOURS).save(path, optimize=True)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def screenshot(browser: str, page: Path, height: int) -> Image.Image:
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--screenshot={folder}/shot.png", f"--window-size={WIDTH},{height}", "--hide-scrollbars"]
        words += ["--headless", "--no-sandbox", f"--user-data-dir={folder}/profile"]
        subprocess.run([browser, *words, page.resolve(strict=True).as_uri()], check=True, capture_output=True)
        with Image.open(f"{folder}/shot.png") as shot:
            return shot.convert("RGB")


if __name__ == "__main__":
    main()
