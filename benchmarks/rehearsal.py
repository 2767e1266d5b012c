"""How far rehearsals are from the jobs that they stand for: passes of each rank, and whole steps.

    python benchmarks/rehearsal.py

Each case is a small job of 2 or 4 processes that trains for real (`torchx run wlb.train`, every step traced),
and its rehearsal, every rank of it, as many at a time as the job has running: what shares memory and caches
in the job does so in the rehearsal too. Of the same steps are compared

- passes: seconds that a rank's passes take in a step, rehearsed over the job's by the clock and of the
  processor; the latter leave out what a pass waits for a core or, in a collective, for other ranks;
- steps: from metrics.jsonl, and put together from the rehearsed passes, with communication by a cluster file
  that is measured first: all-gathers, reduce-scatters and sends of two processes that multiply in between as
  a layer does, small ones for the latency and large ones for the bandwidth, from when the later process
  calls. So the latency has in it what a sleeping process takes to wake up. Processes beyond the cores share
  them: such a step takes at least all their work over the cores.

A machine that others share is not equally fast all the time. So two jobs and two rehearsals of the same steps
take turns of a few seconds: one runs and the others are stopped where they are. Steps of a job in which a
turn ended are left out. A figure is the median over the steps of both rehearsals over both jobs; beside it
is its noise floor: the second job over the first, and the second rehearsal over the first.
Everything wants idle cores; the load is kept beside the results.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import save, saved, show

from wlb_titan.arrays import Floats
from wlb_titan.runs import COMPUTED, read_trace

FILE = "train_configs/cpu_debug.toml"
BIN = Path(sys.executable).parent
FIRST, STEPS = 3, 24  # that are compared
WINDOW = 2048  # tokens
CORES = len(os.sched_getaffinity(0))
TURN = 6.0  # seconds, longer than a step
PP, CP, TP = (f"--parallelism.{axis}_parallel_degree" for axis in ("pipeline", "context", "tensor"))
DP = "--parallelism.data_parallel_shard_degree"
LAZY = ("--wlb.policy", "wlb_lazy/hybrid/best")
SLIM = ("--wlb.policy", "slim", "--wlb.packing.micropacks", "16")
CASES: dict[str, tuple[str, ...]] = {
    "pipeline, plain": (PP, "2", CP, "1"),
    "pipeline, wlb_lazy": (PP, "2", CP, "1", *LAZY),
    "pipeline, slices": (PP, "2", CP, "1", *SLIM),
    "context, plain": (PP, "1", CP, "2", "--wlb.policy", "plain/per_document"),
    "data, plain": (PP, "1", CP, "1", DP, "2", "--training.local_batch_size", "2"),
    "tensor, plain": (PP, "1", CP, "1", TP, "2"),
    "pipeline and context, wlb_lazy": (PP, "2", CP, "2", *LAZY),
}
SMALL, LARGE = 1 << 10, 1 << 23  # bytes
REPEATS, WARM_UP = 100, 4
LAYER = (1024, 768, 768)  # of a product that takes about as long as a layer's pass


def compare(case: str, cluster: Path, folder: Path) -> dict[str, Any]:
    """What two jobs and two rehearsals say of STEPS steps from FIRST on, and what is predicted of them."""
    words = [*CASES[case], "--wlb.cluster", str(cluster), "--wlb.device", "cpu"]
    words += ["--training.seq_len", str(WINDOW)]
    folders = [folder / name for name in ("job", "rehearsal", "second_job", "second_rehearsal")]
    last, at_once = FIRST + STEPS - 1, str(CORES)
    commands = []
    for own in folders:
        own.mkdir(parents=True)
        if own.name.endswith("job"):
            settings = ["--dump_folder", str(own), "--training.steps", str(last), "--metrics.log_freq", "1"]
            settings += ["--wlb.trace_every", "1", "--checkpoint.enable", "false", *words]
            commands.append([str(BIN / "torchx"), "run", "wlb.train", "--config", FILE, "--", *settings])
        else:
            options = ["--rank", "all", "--at-once", at_once, "--step", str(FIRST), "--steps", str(STEPS)]
            options += ["--seconds", "36000", "--output", str(own / "rehearsal.json"), *words]
            commands.append([str(BIN / "wlb-titan"), "rehearse", FILE, *options])
    _in_turns(commands, folders)
    jobs = [_of_job(own, last) for own in folders[::2]]
    rehearsals = [_of_rehearsal(own) for own in folders[1::2]]
    return {"jobs": jobs, "rehearsals": rehearsals, "load": os.getloadavg()[0]}


def _in_turns(commands: list[list[str]], folders: list[Path]) -> None:
    """Runs commands to their ends, each in its folder's log, one at a time."""
    running = []
    try:
        for command, folder in zip(commands, folders, strict=True):
            with open(folder / "log", "w") as log:
                running.append(subprocess.Popen(command, stdout=log, stderr=log))
            _signal(running[-1], signal.SIGSTOP)
        while any(process.poll() is None for process in running):
            for process, folder in zip(running, folders, strict=True):
                if process.poll() is None:
                    _signal(process, signal.SIGCONT)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(TURN)
                    _signal(process, signal.SIGSTOP)
                if process.poll():
                    raise SystemExit(f"{folder.name} failed:\n{(folder / 'log').read_text()[-4000:]}")
    finally:
        for process in running:
            _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    for own in list(_tree(process.pid)) if process.poll() is None else ():
        with suppress(ProcessLookupError):
            os.kill(own, number)


def _tree(process: int) -> Iterator[int]:
    """A process and all that it started."""
    yield process
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            for child in children.read_text().split():
                yield from _tree(int(child))


def _of_job(folder: Path, last: int) -> dict[str, Any]:
    """Of each step its `seconds`, and of each rank's passes in it their sums by the `clock` and of the
    `processor`, None where a turn ended within."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = {record["step"]: record["seconds"] for record in records}
    found: dict[str, Any] = {"seconds": [], "clock": [], "processor": []}
    for step in range(FIRST, last + 1):
        sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for ran in read_trace(folder / "traces" / f"step-{step}.json"):
            if COMPUTED not in ran.facts:  # it is no pass
                continue
            of_rank = sums[ran.replica, ran.rank]
            of_rank[0] += ran.seconds
            of_rank[1] += float(ran.facts[COMPUTED])
        whole = seconds[step] < TURN
        found["seconds"].append(seconds[step] if whole else None)
        found["clock"].append([sums[place][0] if whole else None for place in sorted(sums)])
        found["processor"].append([sums[place][1] for place in sorted(sums)])
    return found


def _of_rehearsal(folder: Path) -> dict[str, Any]:
    """The same; the seconds of steps are put together, and those `predicted` of them."""
    (found,) = json.loads((folder / "rehearsal.json").read_text())["policies"]
    passes = [
        [sum(one["seconds"] for one in step["passes"]) for step in rank["steps"]] for rank in found["ranks"]
    ]
    by_step = np.transpose(passes)
    return {
        "seconds": np.maximum(found["rehearsed"]["seconds"], by_step.sum(axis=1) / CORES).tolist(),
        "processor": by_step.tolist(),
        "predicted": found["predicted"]["seconds"],
    }


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
        for kind in ("collective", "send")
    )
    path.write_text(f"{head}[node]\ngpus = 2\n{node}\n[network]\n{network}")
    return figures


def _communicate(rank: int, queue: Any) -> None:
    """Latency in seconds and bytes/s of collectives, all-gathers and reduce-scatters by turns, and of sends
    between two processes.

    Of a collective the time from when both processes have called it, of a send that from its call until the
    other process has it, which waits for it.
    """
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29517"}
    dist.init_process_group("gloo", rank=rank, world_size=2)

    rows, inner, columns = LAYER
    x, y = torch.randn(rows, inner), torch.randn(inner, columns)

    def seconds(kind: str, bytes_: int) -> float:
        own, all_ = (torch.zeros(bytes_ // size, dtype=torch.float64) for size in (16, 8))
        taken = []
        for turn in range(REPEATS):
            dist.barrier()
            if kind == "collective" or rank == 0:
                x @ y
            begin = all_[0] = time.perf_counter()
            if kind == "collective" and turn % 2:
                dist.all_gather_into_tensor(all_, own)
            elif kind == "collective":
                dist.reduce_scatter_tensor(own, all_)
            elif rank == 0:
                dist.send(all_, 1)
            else:
                dist.recv(all_, 0)
                begin = float(all_[0])  # of the other process, by the same clock
            taken.append(time.perf_counter() - begin)
        each = torch.tensor(taken[WARM_UP:])
        if kind == "collective":
            dist.all_reduce(each, dist.ReduceOp.MIN)  # of the process that called it later
        return float(each.mean())

    figures = {}
    for kind, share in (("collective", 0.5), ("send", 1.0)):  # of the bytes in all, what a process gets
        latency = seconds(kind, SMALL)
        figures[f"{kind}_latency"] = latency
        figures[f"{kind}_bandwidth"] = share * LARGE / max(seconds(kind, LARGE) - latency, 1e-9)
    dist.barrier()
    if rank == 1:  # which receives
        queue.put(figures)
    dist.destroy_process_group()


COLUMNS = {
    "job": "{job}",
    "steps": "{steps}",
    "step, s": "{seconds:.3f}",
    "rehearsed": "{rehearsed}",
    "predicted": "{predicted:+.1%}",
    "passes by the clock": "{clock}",
    "of the processor": "{processor}",
}


def _row(name: str, one: dict[str, Any]) -> dict[str, Any]:
    """Over the job's; in brackets the second job over the first, and rehearsals."""
    jobs, rehearsals = (
        {kind: np.array([each[kind] for each in one[which]], float) for kind in one[which][0]}
        for which in ("jobs", "rehearsals")
    )
    passes = {
        kind: ", ".join(
            _over(rehearsals["processor"][..., rank], jobs[kind][..., rank])
            for rank in range(jobs[kind].shape[2])
        )
        for kind in ("clock", "processor")
    }
    whole = np.isfinite(jobs["seconds"]).all(axis=0)
    return {
        "job": name,
        "steps": whole.sum(),
        "seconds": jobs["seconds"][:, whole].mean(),
        "rehearsed": _over(rehearsals["seconds"], jobs["seconds"]),
        "predicted": _ratio(rehearsals["predicted"].sum(axis=0), jobs["seconds"].sum(axis=0)),
        **passes,
    }


def _over(some: Floats, others: Floats) -> str:
    """How far some seconds, float64 (2, steps), lie from others, and the second of both from the first."""
    own = (f"{_ratio(*each[::-1]):+.1%}" for each in (others, some))
    return f"{_ratio(some.sum(axis=0), others.sum(axis=0)):+.1%} [{', '.join(own)}]"


def _ratio(some: Floats, others: Floats) -> float:
    return float(np.nanmedian(some / others)) - 1


@click.command()
@click.option("--only", "names", multiple=True, type=click.Choice(list(CASES)), default=list(CASES))
def main(names: tuple[str, ...]) -> None:
    record = saved("rehearsal")  # which may have other cases
    with tempfile.TemporaryDirectory() as name:
        for case in names:
            cluster = Path(name) / "cluster.toml"
            communication = write_cluster(cluster)
            found = compare(case, cluster, Path(name) / case)
            settings = {"words": CASES[case], "first": FIRST, "window": WINDOW}
            record["cases"][case] = settings | {"communication": communication} | found
            print(f"{case}: done, load {found['load']:.1f}", flush=True)
            save("rehearsal", record, indent=None)
    show(COLUMNS, (_row(*case) for case in record["cases"].items()))


if __name__ == "__main__":
    main()
