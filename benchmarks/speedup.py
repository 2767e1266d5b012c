"""What balance gains on this machine's cores: small jobs of two processes, each policy beside `plain`.

    wlb-titan prepare outputs/corpus --max-tokens 4000000
    OMP_NUM_THREADS=1 python benchmarks/speedup.py

Every variant is a job of its own, `wlb-titan train train_configs/cpu_pipeline.toml` with the words below, and
the variants of a case take turns for some rounds, so that a machine whose speed drifts is slow for all.
"Work" are the FLOPs that document masks leave: tokens alone would favour a policy that cuts documents or
leaves long ones waiting. A figure is the median over rounds, its scatter the lowest and the highest round,
each over `plain` of the same round; beside it is what the simulator predicts for the same steps. The first
step of a job, which has its start in it, does not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
from common import save, show

from wlb_titan.corpus import Corpus
from wlb_titan.documents import Documents
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator
from wlb_titan.runtime.models.load import load_config
from wlb_titan.simulator.step import simulate

FILE = "train_configs/cpu_pipeline.toml"
POLICY = "--wlb.policy"
DATA = (
    *("--parallelism.pipeline_parallel_degree", "1", "--parallelism.data_parallel_shard_degree", "2"),
    *("--training.local_batch_size", "4"),
)
INTERLEAVED = ("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B")
SLICES = (POLICY, "slim", "--wlb.packing.slack", "0", "--wlb.packing.micropacks")
CASES: dict[str, dict[str, tuple[str, ...]]] = {
    "pipeline": {
        "plain": (),
        "plain, best": (POLICY, "plain//best"),
        "wlb": (POLICY, "wlb"),
        "wlb_lazy": (POLICY, "wlb_lazy"),
        "wlb_lazy, best": (POLICY, "wlb_lazy//best"),
        "slim, M = 8": (*SLICES, "8"),
        "slim, M = 16": (*SLICES, "16"),
        "plain, interleaved": INTERLEAVED,
        "slim, M = 8, interleaved": (*SLICES, "8", *INTERLEAVED),
    },
    "data": {"plain": DATA, "wlb": (*DATA, POLICY, "wlb"), "wlb_lazy": (*DATA, POLICY, "wlb_lazy")},
}


def trained(words: tuple[str, ...], steps: int) -> dict[str, float]:
    """Tokens and work a second of a job's steps after the first; imbalance and bubble of its traced ones."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ["--dump_folder", folder, "--training.steps", str(steps), "--metrics.log_freq", "1"]
        settings += ["--checkpoint.enable", "false", *words]
        command = [sys.executable, "-m", "wlb_titan.commands.main", "train", FILE, *settings]
        job = subprocess.run(command, capture_output=True, text=True)
        if job.returncode:
            raise SystemExit(job.stdout[-2000:] + job.stderr[-2000:])
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    seconds = np.array([record["seconds"] for record in records[1:]])
    found = {
        name: float(np.array([record[key] for record in records[1:]]) @ seconds / seconds.sum())
        for name, key in (("tokens", "tokens_per_second"), ("work", "model_tflops"))
    }
    for key in ("imbalance", "bubble"):
        values = [record[key] for record in records[1:] if key in record]
        found[key] = float(np.mean(values)) if values else float("nan")
    return found


def predicted(words: tuple[str, ...], steps: int) -> float:
    """Work a second in the simulator, of the same steps."""
    from wlb_titan.runtime.configured import job_of, parallel_dims

    config = load_config(FILE, list(words)).config
    job = job_of(config, parallel_dims(config))
    plans = job.plans(Documents(lengths=Corpus.open(config.wlb.corpus.path).lengths), steps)
    return simulate(job, plans[1:]).flops_per_second


def median(rounds: list[dict[str, Any]], variant: str) -> dict[str, Any]:
    """A variant's figures: `rounds` has them of each variant, round by round."""
    over = [one[variant]["work"] / one["plain"]["work"] for one in rounds]
    own = {key: np.median([one[variant][key] for one in rounds]) for key in rounds[0][variant]}
    return own | {"variant": variant, "over": np.median(over), "lowest": min(over), "highest": max(over)}


COLUMNS = {
    "": "{variant}",
    "imbalance": "{imbalance:.2f}",
    "bubble": "{bubble:.3f}",
    "tokens/s": "{tokens:,.0f}",
    "work/s over plain": "{over:.3f}",
    "lowest, highest": "{lowest:.3f}, {highest:.3f}",
    "predicted": "{predicted:.3f}",
}


@click.command(help=__doc__)
@click.option("--steps", default=13, show_default=True, help="Steps of each job; the first does not count.")
@click.option("--rounds", default=3, show_default=True, help="Jobs of each variant.")
@click.option("--only", "names", multiple=True, type=click.Choice(list(CASES)), default=list(CASES))
def main(steps: int, rounds: int, names: tuple[str, ...]) -> None:
    use_cpu_without_accelerator()
    results: dict[str, Any] = {"steps": steps, "cores": os.cpu_count(), "cases": {}}
    for case in names:
        found: list[dict[str, Any]] = []
        for number in range(rounds):
            found.append({variant: trained(words, steps) for variant, words in CASES[case].items()})
            print(f"{case}: round {number + 1}, load {os.getloadavg()[0]:.1f}", flush=True)
        simulated = {variant: predicted(words, steps) for variant, words in CASES[case].items()}
        print(f"\n{case}\n")
        rows = (median(found, name) | {"predicted": x / simulated["plain"]} for name, x in simulated.items())
        show(COLUMNS, rows)
        results["cases"][case] = {"rounds": found, "predicted": simulated}
    save("speedup", results)


if __name__ == "__main__":
    main()
