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
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
BALANCED = ["--policy", "wlb_lazy:hybrid:best", "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"]
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


@click.command(help=__doc__)
@click.option(
    "--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/cpu/memory_traced.json"
)
def main(output: Path) -> None:
    rows = []
    print("| file | policy | rank | longest micro-batch | predicted GiB | traced GiB | difference |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in FILES:
        for kind in ("plain", "balanced"):
            for rank in dry_run(name, kind):
                rows.append({"file": name, "policy": kind, **rank})
                predicted, traced = rank["predicted_gib"], rank["traced_gib"]
                print(
                    f"| {name} | {kind} | {rank['rank']} | {max(rank['lengths']):,} | {predicted:.2f} | "
                    f"{traced:.2f} | {predicted / traced - 1:+.1%} |",
                    flush=True,
                )
    worst = max(abs(row["predicted_gib"] / row["traced_gib"] - 1) for row in rows)
    print(f"\nThe largest difference is {worst:.1%}.")
    for row in rows:
        del row["largest"]
    output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
