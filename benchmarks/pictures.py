"""Screenshots of the pages that the tutorial's commands write, for it and README.md: docs/images/*.png.

    apt-get install chromium
    wlb-titan prepare outputs/corpus --max-tokens 4000000
    wlb-titan plan train_configs/llama2_7b_128k.toml --policies plain,fixed_greedy,wlb,wlb_lazy \
        --report outputs/tutorial/plan
    wlb-titan simulate train_configs/llama2_7b_128k.toml --lengths paper --report outputs/tutorial/paper \
        --policies plain,wlb_lazy/hybrid/best,slim/hybrid
    wlb-titan bench train_configs/cpu_pipeline_slices.toml --policies plain,slim/hybrid \
        --dump_folder outputs/tutorial/bench
    wlb-titan compare outputs/tutorial/bench --report outputs/tutorial/turns
    python benchmarks/pictures.py

Where a page gets other sections, the rows of SCREENSHOTS have to follow.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
SCREENSHOTS = {
    "planned": ("plan", 145, 568),
    "parts": ("paper", 145, 518),
    "simulated": ("paper", 0, 1274),
    "measured": ("turns", 0, 802),
}
"""Screenshot: the page, in outputs/tutorial, and the first and last row of its pixels that is shown."""
SHOT_WIDTH, COLOURS = 900, 96  # a page has few colours; the rest are the edges of letters


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("error: no Chromium is installed. On Debian: apt-get install chromium")
    for name, (folder, first, last) in SCREENSHOTS.items():
        path = ROOT / "docs" / "images" / f"{name}.png"
        page = screenshot(browser, ROOT / "outputs" / "tutorial" / folder / "report.html", last)
        page.crop((0, first, SHOT_WIDTH, last)).quantize(COLOURS).save(path, optimize=True)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def screenshot(browser: str, page: Path, height: int) -> Image.Image:
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--screenshot={folder}/shot.png", f"--window-size={SHOT_WIDTH},{height}"]
        words += ["--hide-scrollbars", "--headless", "--no-sandbox", f"--user-data-dir={folder}/profile"]
        subprocess.run([browser, *words, page.resolve(strict=True).as_uri()], check=True, capture_output=True)
        with Image.open(f"{folder}/shot.png") as shot:
            return shot.convert("RGB")


if __name__ == "__main__":
    main()
