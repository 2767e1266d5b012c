"""How far rehearsals are from the jobs that they stand for: passes of each rank, and whole steps.

    python benchmarks/rehearsal.py --output benchmarks/results/cpu/rehearsal.json

Each case is a small job of 2 or 4 processes that trains for real (`torchx run wlb.train`, every step traced),
and then is rehearsed, every rank of it, as many at a time as the job has running: what shares memory and
caches in the job does so in the rehearsal too. Of the same steps are compared

- passes: seconds that a rank's passes take in a step, by the clock and of the processor; the latter leave out
  when a pass waits for a core, such as while the loader prepares the next step. Only without context, tensor
  and data parallelism, whose collectives are waited for within a job's passes;
- steps: from metrics.jsonl, and put together from the rehearsed passes, with communication by a cluster file
  that is measured first: all-gathers and sends of two processes that multiply in between as a layer does,
  small ones for the latency and large ones for the bandwidth. So the latency has in it what processes wait
  for each other, and what a sleeping one takes to wake up. Processes beyond the cores share them: such a step
  takes at least all their work over the cores.

Times are means over the steps. A machine that others share is not equally fast all the time, so job and
rehearsal take turns, `--rounds` times, and each difference stands beside its least and largest of a round.
Everything wants idle cores; the load is printed and kept beside the results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from wlb_titan.timeline import read_trace

FILE = "train_configs/cpu_debug.toml"
BIN = Path(sys.executable).parent
PP, CP, TP = (f"--parallelism.{axis}_parallel_degree" for axis in ("pipeline", "context", "tensor"))
DP = "--parallelism.data_parallel_shard_degree"
LAZY = ("--wlb.packing.policy", "wlb_lazy", "--wlb.pipeline.order", "best")
SLIM = ("--wlb.packing.policy", "slim", "--wlb.packing.micropacks", "16")
CASES: dict[str, tuple[str, ...]] = {
    "pipeline, plain": (PP, "2", CP, "1"),
    "pipeline, wlb_lazy": (PP, "2", CP, "1", *LAZY),
    "pipeline, slices": (PP, "2", CP, "1", *SLIM),
    "context, plain": (PP, "1", CP, "2", "--wlb.sharding.policy", "per_document"),
    "data, plain": (PP, "1", CP, "1", DP, "2", "--training.local_batch_size", "2"),
    "tensor, plain": (PP, "1", CP, "1", TP, "2"),
    "pipeline and context, wlb_lazy": (PP, "2", CP, "2", *LAZY, "--wlb.sharding.policy", "hybrid"),
}
SMALL, LARGE = 1 << 10, 1 << 23  # bytes
REPEATS = 60
LAYER = (1024, 768, 768)  # of a product that takes about as long as a layer's pass


def train(words: Sequence[str], folder: Path, steps: int) -> tuple[dict[int, float], dict[int, list[Any]]]:
    """A job's seconds by step, and spans of the passes of all its ranks."""
    settings = ["--dump_folder", str(folder), "--training.steps", str(steps), "--metrics.log_freq", "1"]
    settings += ["--wlb.trace_every", "1", "--checkpoint.enable", "false", *words]
    _run([str(BIN / "torchx"), "run", "wlb.train", "--config", FILE, "--", *settings])
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = {record["step"]: record["seconds"] for record in records}
    return seconds, {step: read_trace(folder / "traces" / f"step-{step}.json") for step in seconds}


def rehearse(words: Sequence[str], folder: Path, first: int, steps: int, at_once: int) -> dict[str, Any]:
    output = folder / "rehearsal.json"
    options = ["--rank", "all", "--at-once", str(at_once), "--step", str(first), "--steps", str(steps)]
    _run([str(BIN / "wlb-titan"), "rehearse", FILE, *options, "--output", str(output), *words])
    (found,) = json.loads(output.read_text())["policies"]
    return dict(found)


def compare(name: str, cluster: Path, folder: Path, first: int, steps: int, window: int) -> dict[str, Any]:
    """What both say of the steps from `first` on."""
    words = [*CASES[name], "--wlb.cluster", str(cluster), "--wlb.device", "cpu"]
    words += ["--training.seq_len", str(window)]
    taken, traces = train(words, folder / "job", first + steps - 1)
    processes = len({(span.process, span.track) for span in traces[first]})
    cores = len(os.sched_getaffinity(0))
    found = rehearse(words, folder, first, steps, min(processes, cores))
    counted = range(first, first + steps)
    measured = np.array([taken[step] for step in counted])
    rehearsed = np.array(found["rehearsed"]["seconds"])
    busy = np.sum(
        [[sum(p[4] for p in step["passes"]) for step in rank["steps"]] for rank in found["ranks"]], axis=0
    )
    rehearsed = np.maximum(rehearsed, busy / cores)
    result = {
        "processes": processes,
        "measured_seconds": measured.tolist(),
        "rehearsed_seconds": rehearsed.tolist(),
        "predicted_seconds": found["predicted"]["seconds"],
        "passes": [],
    }
    if name.startswith("pipeline, "):
        for rank in found["ranks"]:
            track = f"pp {rank['coordinates']['pp']}"
            spans = [[s for s in traces[step] if s.track == track] for step in counted]
            result["passes"].append(
                {
                    "rank": rank["rank"],
                    "measured": [sum(s.duration for s in own) for own in spans],
                    "rehearsed": [sum(p[4] for p in step["passes"]) for step in rank["steps"]],
                    "measured_processor": [sum(s.args["processor_seconds"] for s in own) for own in spans],
                    "rehearsed_processor": [sum(p[5] for p in step["passes"]) for step in rank["steps"]],
                }
            )
    return result


def write_cluster(path: Path) -> dict[str, float]:
    """The shipped file of a CPU with what this machine's processes take to communicate."""
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    workers = [context.Process(target=_communicate, args=(rank, queue)) for rank in range(2)]
    for worker in workers:
        worker.start()
    figures: dict[str, float] = queue.get()
    for worker in workers:
        worker.join()
    shipped = Path(__file__).parents[1] / "wlb_titan" / "cost" / "clusters"
    head = (shipped / "cpu.toml").read_text().split("[node]")[0]
    head = head.replace("cpu_attention.json", str(shipped / "cpu_attention.json"))
    node, network = (
        f"bandwidth = {figures[f'{kind}_bandwidth']:g}\nlatency = {figures[f'{kind}_latency']:g}\n"
        for kind in ("gather", "send")
    )
    path.write_text(f"{head}[node]\ngpus = 2\n{node}\n[network]\n{network}")
    return figures


def _communicate(rank: int, queue: Any) -> None:
    """Latency in seconds and bytes/s of all-gathers and of sends between two processes.

    Of an all-gather what both processes spend in it on average, early or late; of a send the time from its
    call until the other process has it, which waits for it.
    """
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29517"}
    dist.init_process_group("gloo", rank=rank, world_size=2)

    rows, inner, columns = LAYER
    x, y = torch.randn(rows, inner), torch.randn(inner, columns)

    def seconds(kind: str, bytes_: int) -> float:
        own, all_ = (
            torch.zeros(bytes_ // 16, dtype=torch.float64),
            torch.zeros(bytes_ // 8, dtype=torch.float64),
        )
        taken = []
        for _ in range(REPEATS):
            dist.barrier()
            if kind == "gather" or rank == 0:
                x @ y
            begin = all_[0] = time.perf_counter()
            if kind == "gather":
                dist.all_gather_into_tensor(all_, own)
            elif rank == 0:
                dist.send(all_, 1)
            else:
                dist.recv(all_, 0)
                begin = float(all_[0])  # of the other process, by the same clock
            taken.append(time.perf_counter() - begin)
        mean = torch.tensor(np.mean(taken))
        if kind == "gather":
            dist.all_reduce(mean)
            mean /= 2
        return float(mean)

    figures = {}
    for kind, share in (("gather", 0.5), ("send", 1.0)):  # of the bytes in all, what a process gets
        latency = seconds(kind, SMALL)
        figures[f"{kind}_latency"] = latency
        figures[f"{kind}_bandwidth"] = share * LARGE / max(seconds(kind, LARGE) - latency, 1e-9)
    dist.barrier()
    if rank == 1:  # which receives
        queue.put(figures)
    dist.destroy_process_group()


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")


def show(cases: dict[str, Any]) -> None:
    heads = (
        "job",
        "processes",
        "step, s",
        "rehearsed",
        "predicted",
        "passes of each rank",
        "of the processor",
    )
    table = Table(*heads, title="over the job's; in brackets the least and the largest of a round")
    for name, one in cases.items():
        rounds = one["rounds"]
        measured = np.concatenate([each["measured_seconds"] for each in rounds])
        error = measured.std(ddof=1) / len(measured) ** 0.5 if len(measured) > 1 else float("nan")
        ranks = range(len(rounds[0]["passes"]))
        table.add_row(
            *(name, str(rounds[0]["processes"]), f"{measured.mean():.3f} ±{error:.3f}"),
            *(_over(rounds, f"{kind}_seconds", "measured_seconds") for kind in ("rehearsed", "predicted")),
            *(
                ", ".join(
                    _over([each["passes"][rank] for each in rounds], f"rehearsed{kind}", f"measured{kind}")
                    for rank in ranks
                )
                for kind in ("", "_processor")
            ),
        )
    Console(width=150).print(table)


def _over(rounds: list[dict[str, Any]], some: str, others: str) -> str:
    """How far the sum over all rounds lies from another's, and so of the rounds."""
    sums = np.array([[sum(one[some]), sum(one[others])] for one in rounds])
    whole, each = np.divide(*sums.sum(axis=0)) - 1, sums[:, 0] / sums[:, 1] - 1
    return f"{whole:+.1%} [{each.min():+.0%}, {each.max():+.0%}]".replace("[", "\\[")


@click.command()
@click.option("--steps", default=10, show_default=True, help="That are compared.")
@click.option("--first", default=3, show_default=True, help="Of them.")
@click.option("--window", default=8192, show_default=True, help="Context window in tokens.")
@click.option("--rounds", default=3, show_default=True, help="Of job and rehearsal.")
@click.option("--only", multiple=True, type=click.Choice(list(CASES)), help="These cases.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the results.")
def main(
    steps: int, first: int, window: int, rounds: int, only: tuple[str, ...], output: Path | None
) -> None:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = folder / "cluster.toml"
        figures = write_cluster(cluster)
        for case in only or CASES:
            results[case] = {"words": CASES[case], "rounds": []}
            for number in range(rounds):
                own = folder / f"{len(results)}-{number}"
                own.mkdir()
                found = compare(case, cluster, own, first, steps, window) | {"load": os.getloadavg()[0]}
                results[case]["rounds"].append(found)
                print(f"{case}, round {number + 1}: done, load {found['load']:.1f}", flush=True)
            if output is not None:  # after each case, as all of them take long
                record = {"cores": os.cpu_count(), "communication": figures, "cases": results}
                output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    show(results)


if __name__ == "__main__":
    main()
