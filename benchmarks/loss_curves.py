"""Validation loss under the packing policies, over several seeds (the paper's Figures 6 and 16 in small).

    OMP_NUM_THREADS=1 python benchmarks/loss_curves.py outputs/loss              # all of it
    OMP_NUM_THREADS=1 python benchmarks/loss_curves.py outputs/loss --minutes 60 # a part; again to go on
    OMP_NUM_THREADS=1 python benchmarks/loss_curves.py outputs/loss --at-once 4  # on four cores

trains the debug model (1.8 M weights) under each policy with each seed: `plain`; `fixed_greedy`, which
repacks 8 global batches, as in Figure 16; `wlb`, `wlb_lazy` and `slim`. The runs of one seed
start from the same weights and share the order of documents. All are validated on the same documents,
which none of them trains on, every 100 steps.

Runs take turns: each goes on from its last checkpoint for five validations, those that are furthest behind
first, `--at-once` of them side by side, so that a run of hours can be stopped at any time and loses no more
than a turn. When all have finished,
benchmarks/results/cpu/loss_curves.json and .svg are written.

The corpus has a long tail at the window, as the paper's has: Python files of this machine, cut into documents
whose characters are log-normal, with a median of 0.22 for each token of the window (three characters are
about a token) and sigma 1.4, so that about 3 % of them are longer than the window. Every 50th file is held
out.

What is compared is the mean of a run's last validations minus that of `plain` with the same seed, and the
standard error of this difference over the seeds: seeds differ by more than policies do.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import matplotlib.pyplot as plt
import numpy as np
from common import RESULTS, save, show

from wlb_titan.prepare.prepare import PrepareSettings, prepare_corpus
from wlb_titan.runs import Run as Left
from wlb_titan.runs import open_run
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

from wlb_titan.runtime.checkpoints import newest_whole  # noqa: E402

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "plain": [],
    "fixed_greedy": ["--wlb.packing.global_batches", "8"],
    "wlb": [],
    "wlb_lazy": [],
    "slim": [],
}
MEDIAN, SIGMA = 0.22, 1.4  # characters of a document, for each token of the window
CHARACTERS = 30_000  # of the corpus, likewise
SHORTEST = 32  # characters
HELD_OUT = 50  # one file of so many
VALIDATED = 32  # windows of tokens
SEEDS, STEPS = 3, 1500
EVERY = 100  # steps from one validation to the next
TURN = 5  # validations from one checkpoint to the next
LAST = 3  # validations that make a run's result


def make_corpus(folder: Path, window: int) -> None:
    """Writes the corpus and, beside it, that of the held-out documents."""
    if (folder / "corpus" / "corpus.json").is_file():
        return
    rng = np.random.default_rng(0)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files += sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    folder.mkdir(parents=True, exist_ok=True)
    left = CHARACTERS * window
    with (folder / "train.jsonl").open("w") as train, (folder / "held_out.jsonl").open("w") as held:
        for number, index in enumerate(rng.permutation(len(files)).tolist()):
            text = files[index].read_text(encoding="utf-8", errors="ignore")
            begin = 0
            while begin < len(text):
                end = begin + max(int(rng.lognormal(np.log(MEDIAN * window), SIGMA)), SHORTEST)
                line = json.dumps({"text": text[begin:end]}) + "\n"
                (held if number % HELD_OUT == 0 else train).write(line)
                begin = end
            left -= len(text)
            if left < 0:
                break
    corpus = prepare_corpus(PrepareSettings(source=f"jsonl:{folder / 'train.jsonl'}#text"), folder / "corpus")
    held_out = f"jsonl:{folder / 'held_out.jsonl'}#text"
    tokenizer = str(corpus.tokenizer_path)
    settings = PrepareSettings(source=held_out, tokenizer=tokenizer, max_tokens=VALIDATED * window)
    prepare_corpus(settings, folder / "held_out")


@dataclass(frozen=True)
class Run:
    """One policy with one seed, which goes on from wherever it stopped."""

    folder: Path
    policy: str
    seed: int
    window: int

    @property
    def dump(self) -> Path:
        return self.folder / f"{self.policy}-{self.seed}"

    @property
    def left(self) -> Left:
        """What it left in its dump folder."""
        return open_run(self.dump, self.dump.name)

    @property
    def validations(self) -> dict[int, float]:
        """Loss after so many steps."""
        steps, losses = self.left.validation
        return dict(zip(map(int, steps), losses.tolist(), strict=True))

    @property
    def steps(self) -> int:
        """Steps that are done and checkpointed."""
        return max(newest_whole(self.dump / "checkpoint").step, 0)

    def go_on(self, until: int) -> None:
        """Trains to step `until`, in a process of its own; the learning rate's schedule is that of all."""
        words = [
            *("--dump_folder", str(self.dump), "--training.steps", str(until)),
            *("--lr_scheduler.total_steps", str(STEPS), "--training.seq_len", str(self.window)),
            *("--parallelism.data_parallel_shard_degree", "1", "--parallelism.context_parallel_degree", "1"),
            *("--training.local_batch_size", "4", "--debug.enable_structured_logging", "false"),
            *("--activation_checkpoint", "none"),  # a model so small needs none
            *("--wlb.corpus.path", str(self.folder / "corpus"), "--wlb.corpus.seed", str(self.seed)),
            *("--debug.seed", str(self.seed), "--wlb.trace_every", "0"),
            *("--checkpoint.enable", "true", "--checkpoint.interval", str(TURN * EVERY)),
            *("--checkpoint.keep_latest_k", "2", "--checkpoint.last_save_model_only", "false"),
            *("--wlb.validation.path", str(self.folder / "held_out"), "--wlb.validation.every", str(EVERY)),
            *("--wlb.policy", self.policy, *SETTINGS[self.policy]),
        ]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
        command += ["-m", "wlb_titan.runtime.train", "--config"]
        command += [str(ROOT / "train_configs/cpu_policies.toml"), *words]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
        if result.returncode != 0:
            raise click.ClickException(f"{self.policy}, seed {self.seed}:\n{result.stderr[-3000:]}")


def summary(runs: list[Run], settings: dict[str, Any]) -> dict[str, Any]:
    """Curves, and for each policy its mean loss, its difference from `plain` and the error of that."""
    last = {(run.policy, run.seed): list(run.validations.values())[-LAST:] for run in runs}
    result: dict[str, Any] = {"settings": settings, "validation": {}, "curves": {}}
    for policy in SETTINGS:
        own = [statistics.mean(last[policy, seed]) for seed in range(SEEDS)]
        minus = [mine - statistics.mean(last["plain", seed]) for seed, mine in enumerate(own)]
        records = [r for run in runs if run.policy == policy for r in run.left.records]
        result["validation"][policy] = {
            "by_seed": own,
            "mean": statistics.mean(own),
            "minus_plain": statistics.mean(minus),
            "standard_error": statistics.stdev(minus) / SEEDS**0.5,
            "imbalance": statistics.mean(r["imbalance"] for r in records),
            "delay": statistics.mean(r["delay_mean"] for r in records),
        }
        result["curves"][policy] = [run.validations for run in runs if run.policy == policy]
    return result


def draw(curves: dict[str, list[dict[int, float]]], path: Path) -> None:
    """Loss by step, and beside it minus that of `plain` with the same seed, from the second validation on."""
    figure, (whole, beside) = plt.subplots(ncols=2, figsize=(11, 4.5), layout="constrained")
    by_policy = {policy: np.array([list(run.values()) for run in runs]) for policy, runs in curves.items()}
    steps = list(curves["plain"][0])
    for axes, first, minus in ((whole, 0, 0.0), (beside, 1, by_policy["plain"])):
        for policy, all_losses in by_policy.items():
            losses = (all_losses - minus)[:, first:]
            (line,) = axes.plot(steps[first:], losses.mean(axis=0), label=policy, linewidth=1.8)
            ends = losses.min(axis=0), losses.max(axis=0)
            axes.fill_between(steps[first:], *ends, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.spines[["top", "right"]].set_visible(False)
    whole.set(xlabel="step", ylabel="validation loss: mean, range of seeds", title="Loss by packing policy")
    beside.set(xlabel="step", title="minus that of plain with the same seed")
    whole.legend(frameon=False)
    figure.savefig(path)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--window", default=2048, show_default=True, help="Context window in tokens.")
@click.option("--at-once", default=1, show_default=True, help="Runs side by side, a core each.")
@click.option("--minutes", type=float, help="Begin nothing new after so long.  [default: run to the end]")
def main(folder: Path, window: int, at_once: int, minutes: float | None) -> None:
    """Train under every policy, in FOLDER, and compare the losses on held-out documents."""
    folder = folder.resolve()
    make_corpus(folder, window)
    runs = [Run(folder, policy, seed, window) for seed in range(SEEDS) for policy in SETTINGS]
    end = time.monotonic() + 60 * minutes if minutes is not None else float("inf")

    def go_on(run: Run) -> None:
        begin, before = time.monotonic(), run.steps
        run.go_on(min(before + TURN * EVERY, STEPS))
        print(f"{run.policy}, seed {run.seed}: step {run.steps}, {time.monotonic() - begin:.0f} s")
        if run.steps == before:
            raise click.ClickException(f"{run.policy}, seed {run.seed} made no progress.")

    with ThreadPoolExecutor(at_once) as pool:
        while behind := [run for run in runs if run.steps < STEPS]:
            if time.monotonic() > end:
                done = sum(run.steps for run in runs)
                print(f"{done:,} of {STEPS * len(runs):,} steps are done. Start again to go on.")
                return
            list(pool.map(go_on, sorted(behind, key=lambda run: run.steps)[:at_once]))

    settings = {"seeds": SEEDS, "steps": STEPS, "window": window, "every": EVERY, "micro_batches": 4}
    result = summary(runs, settings)
    save("loss_curves", result)
    draw(result["curves"], RESULTS / "loss_curves.svg")
    names = ("mean", "minus_plain", "standard_error", "imbalance", "delay")
    columns = {"policy": "{policy}"} | {name: f"{{{name}:.4f}}" for name in names}
    show(columns, ({"policy": policy, **row} for policy, row in result["validation"].items()))


if __name__ == "__main__":
    main()
