"""Predicted beside traced peak memory: every file of Table 1, plain and balanced, first and last rank.

    python benchmarks/memory_traced.py

Runs `wlb-titan dryrun` on train_configs/llama2_*.toml, as they are and balanced. Without the files' corpus,
lengths are synthetic.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from common import save, show

ROOT = Path(__file__).parents[1]
BALANCED = [
    "--wlb.policy",
    "wlb_lazy/hybrid/best",
    "--parallelism.pipeline_parallel_schedule",
    "Interleaved1F1B",
]
FILES = [f"llama2_{size}_{window}" for size in ("550m", "7b", "30b", "70b") for window in ("64k", "128k")]


def dry_run(name: str, kind: str) -> list[dict[str, Any]]:
    """What `wlb-titan dryrun` finds of the first and the last rank of a file of Table 1."""
    path, words = ROOT / "train_configs" / f"{name}.toml", BALANCED if kind == "balanced" else []
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "ranks.json"
        command = [sys.executable, "-m", "wlb_titan.commands.main", "dryrun", str(path), *words]
        options = ["--step", "9", "--output", str(output)]
        subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
        ranks: list[dict[str, Any]] = json.loads(output.read_text())
    return ranks


def ranks() -> Iterator[dict[str, Any]]:
    for name, kind in product(FILES, ("plain", "balanced")):
        for rank in dry_run(name, kind):
            del rank["largest"]
            longest, difference = max(rank["lengths"]), rank["predicted_gib"] / rank["traced_gib"] - 1
            yield {"file": name, "policy": kind, **rank, "longest": longest, "difference": difference}


COLUMNS = {
    "file": "{file}",
    "policy": "{policy}",
    "rank": "{rank}",
    "longest micro-batch": "{longest:,}",
    "predicted GiB": "{predicted_gib:.2f}",
    "traced GiB": "{traced_gib:.2f}",
    "difference": "{difference:+.1%}",
}


def main() -> None:
    rows = show(COLUMNS, ranks())
    print(f"\nThe largest difference is {max(abs(row['difference']) for row in rows):.1%}.")
    save("memory_traced", rows)


if __name__ == "__main__":
    main()
