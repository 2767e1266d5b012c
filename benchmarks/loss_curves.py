"""Training loss under the packing policies, over several seeds (the paper's Figures 6 and 16 in small).

    python benchmarks/loss_curves.py --output benchmarks/results/cpu

trains the debug model on the Python files of this machine, one process a run, `--jobs` runs at a time, and
writes loss_curves.json and loss_curves.svg. `fixed_greedy` repacks 8 global batches, as in the paper's
Figure 16. The runs of one seed start from the same weights and share the order of documents.

What is compared is the mean loss of the last steps, against `plain` of the same seed: a model this small and
this young differs by more between seeds than a policy could change, so only paired differences say anything.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
POLICIES = {
    "plain": [],
    "fixed_greedy": ["--wlb.packing.global_batches", "8"],
    "wlb": ["--wlb.packing.thresholds", "[1024, 2048]"],
    "wlb_lazy": [],
}


def train(policy: str, seed: int, steps: int, window: int, folder: Path) -> list[dict]:
    """One run in a process of its own; its metrics, one record a step."""
    dump = folder / f"{policy}-{seed}"
    words = [
        *("--dump_folder", str(dump), "--training.steps", str(steps), "--training.seq_len", str(window)),
        *("--parallelism.data_parallel_shard_degree", "1", "--parallelism.context_parallel_degree", "1"),
        *("--training.local_batch_size", "4", "--debug.enable_structured_logging", "false"),
        *("--wlb.corpus.seed", str(seed), "--debug.seed", str(seed)),
        *("--wlb.packing.policy", policy, *POLICIES[policy]),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    command += ["-m", "wlb_titan.runtime.train", "--config", str(ROOT / "train_configs/cpu_policies.toml")]
    result = subprocess.run(command + words, cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        raise click.ClickException(result.stderr[-3000:])
    return [json.loads(line) for line in (dump / "metrics.jsonl").read_text().splitlines()]


def draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for policy, runs in curves.items():
        mean = [statistics.mean(losses) for losses in zip(*runs, strict=True)]
        low, high = [min(x) for x in zip(*runs, strict=True)], [max(x) for x in zip(*runs, strict=True)]
        steps = range(1, len(mean) + 1)
        (line,) = axes.plot(steps, mean, label=policy, linewidth=1.8)
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(xlabel="step", ylabel="loss per token: mean, range of seeds", title="Loss by packing policy")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder of the results.")
@click.option("--seeds", default=3, show_default=True, help="Runs of each policy.")
@click.option("--steps", default=40, show_default=True, help="Steps of each run.")
@click.option("--window", default=2048, show_default=True, help="Context window in tokens.")
@click.option("--last", default=10, show_default=True, help="Steps over which the final loss is averaged.")
@click.option("--jobs", default=2, show_default=True, help="Runs at a time.")
def main(output: Path, seeds: int, steps: int, window: int, last: int, jobs: int) -> None:
    """Train under every policy and compare the losses."""
    pairs = [(policy, seed) for seed in range(seeds) for policy in POLICIES]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(train, policy, seed, steps, window, Path(folder)) for policy, seed in pairs]
        runs = dict(zip(pairs, (future.result() for future in futures), strict=True))
    curves = {p: [[r["loss"] for r in runs[p, seed]] for seed in range(seeds)] for p in POLICIES}
    final = {p: [statistics.mean(losses[-last:]) for losses in curves[p]] for p in POLICIES}

    table = Table("policy", "final loss", "minus plain, by seed", "imbalance", "delay")
    summary = {}
    for policy in POLICIES:
        records = [record for seed in range(seeds) for record in runs[policy, seed]]
        difference = [mine - plain for mine, plain in zip(final[policy], final["plain"], strict=True)]
        summary[policy] = {
            "final_loss": final[policy],
            "minus_plain": difference,
            "imbalance": statistics.mean(r["imbalance"] for r in records),
            "delay": statistics.mean(r["delay_mean"] for r in records),
            "losses": curves[policy],
        }
        table.add_row(
            policy,
            f"{statistics.mean(final[policy]):.3f}",
            " ".join(f"{d:+.3f}" for d in difference),
            f"{summary[policy]['imbalance']:.3f}",
            f"{summary[policy]['delay']:.2f}",
        )
    output.mkdir(parents=True, exist_ok=True)
    settings = {"seeds": seeds, "steps": steps, "window": window, "last": last, "micro_batches": 4}
    (output / "loss_curves.json").write_text(json.dumps({"settings": settings, "policies": summary}) + "\n")
    draw(curves, output / "loss_curves.svg")
    Console().print(table)


if __name__ == "__main__":
    main()
