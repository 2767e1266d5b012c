"""Packing without training: balance, delay, plan time, and very many documents.

    python benchmarks/packing.py scale
    python benchmarks/packing.py never-worse --files FILES    # after `wlb-titan prepare FILES`
    python benchmarks/packing.py billion --folder FOLDER

Each prints its rows and writes results/cpu/packing_*.json.

The lengths are made so that the original packing is as unbalanced as the paper's (1.44 with N = 4, a window
of 128K and the 7B model) and its other facts hold: most documents are short, the longest fill the window, and
more than 75 % of tokens lie in documents shorter than half the window.

- 99.4 % of documents: log-normal, median 460 tokens, sigma 1.3;
- 0.6 %: Pareto with exponent 0.5 between 16K and 1M tokens;
- none below 16 tokens, and those above the window are truncated to it, as the paper's loader does.

The work of a document is that of LLaMA2-7B in FLOPs, forward and backward, at equal efficiency:
3.5 x 262144 d^2 for attention (causal, 2 x 4096 x 32 a pair, 2.5 times that in the backward pass) and
3 x 13.2e9 d for linear layers. It needs no device to be reproduced: quadratic:917504,3.96e10.
"""

from __future__ import annotations

import os
import struct
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np
from common import machine, save, show

from wlb_titan.arrays import Ints
from wlb_titan.corpus import Corpus
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.job import Job
from wlb_titan.packing import POLICIES
from wlb_titan.plan import Plan
from wlb_titan.planner import Planner
from wlb_titan.summary import Summary

WINDOW = 131072
COST_MODEL = "quadratic:917504,3.96e10"
COMPARED = ("plain", "wlb", "wlb_lazy")
DRAWN = 10_000_000  # lengths that are repeated, in another order each time


def synthetic_lengths(documents: int, seed: int = 1) -> Ints:
    """int64 (documents,), tokens; see above."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(460), 1.3, documents))
    tail = rng.random(documents) < 0.006
    low, high = (16384**-0.5, (8 * WINDOW) ** -0.5)
    lengths[tail] = (low - rng.random(int(tail.sum())) * (low - high)) ** -2.0
    return np.clip(lengths.astype(np.int64), 16, WINDOW)


def planner_of(documents: Documents, policy: str, micro_batches: int, window: int = WINDOW) -> Planner:
    """A planner of packing alone: one rank, COST_MODEL, micro-batches of at most two windows."""
    return Job(
        window=window,
        micro_batches=micro_batches,
        packing=POLICIES.configure(policy, cost_model=COST_MODEL),
        memory_unknown="a planner",  # so that two windows are the bound
    ).planner(documents)


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
def scale() -> None:
    """Balance, delay and plan time as the job grows: N = 4, 64 and 2048 micro-batches a step, window 128K.

    With N = 64 a step has about 5,700 documents, with N = 2048 about 180,000.
    """

    def rows() -> Iterator[dict[str, Any]]:
        for micro_batches, steps in {4: 2000, 64: 400, 2048: 48}.items():
            # Two epochs for the longest run; more documents would only take more memory.
            lengths = synthetic_lengths(min(4_000_000, micro_batches * 91 * steps))
            for policy in ("plain", "fixed_greedy", "wlb", "wlb_lazy"):
                figures = measure(Documents(lengths=lengths, seed=None), policy, micro_batches, steps)
                yield {"micro_batches": micro_batches, "policy": policy, **figures}

    columns = {
        "N": "{micro_batches}",
        "policy": "{policy}",
        "imbalance": "{imbalance_mean:.3f}",
        "p95": "{imbalance_p95:.3f}",
        "delay": "{delay_mean:.2f}",
        "longest delay": "{delay_max}",
        "documents a step": "{documents:,.0f}",
        "plan, ms": "{plan_ms:.1f}",
        "of the processor": "{cpu_ms:.1f}",
    }
    save("packing_scale", machine() | {"rows": show(columns, rows())})


def measure(
    documents: Documents, policy: str, micro_batches: int, steps: int, window: int = WINDOW
) -> dict[str, Any]:
    """Plans `steps` steps, after eight in which queues fill, and sums them up.

    Returns:
        `Summary.figures`, with `plan_ms` the median and `plan_ms_mean` the mean of wall time; `cpu_ms`, the
        median of the thread's CPU time, which other load on the machine does not change; `documents`, the
        median number of documents of a step.
    """
    planner = planner_of(documents, policy, micro_batches, window)
    for _ in range(8):
        planner.next()
    cpu, packed = [], []

    def plans() -> Iterator[Plan]:
        for _ in range(steps):
            begin = time.thread_time()
            plan = planner.next()
            cpu.append((time.thread_time() - begin) * 1e3)
            packed.append(sum(len(m.documents) for m in plan.micro_batches))
            yield plan

    summary = Summary.of(plans(), window)
    return {
        **summary.figures(),
        "plan_ms_mean": float(summary.plan_ms.mean()),
        "cpu_ms": float(np.median(cpu)),
        "documents": float(np.median(packed)),
        "steps": steps,
    }


@main.command()
@click.option("--files", help="Corpus of Python files.")
@click.option("--steps", default=200, show_default=True)
def never_worse(files: str | None, steps: int) -> None:
    """Whether balancing policies are ever worse than `plain`: imbalance, mean and 95th percentile, and delay
    on many corpora, windows and N. Six corpora are drawn, from equal lengths to a tail without end; one is
    Python source."""
    rng, count = np.random.default_rng(1), 200_000
    corpora: dict[str, Any] = {
        "the paper's tail": synthetic_lengths(count),
        "log-normal 1.0": rng.lognormal(6.5, 1.0, count).astype(np.int64) + 2,
        "log-normal 2.0": rng.lognormal(6.5, 2.0, count).astype(np.int64) + 2,
        "Pareto 1.2": (rng.pareto(1.2, count) * 300).clip(2, 2**22).astype(np.int64),
        "uniform": rng.integers(2, 4096, count),
        "equal": np.full(count, 700),
    }
    if files:
        corpora["files"] = Corpus.open(files).lengths

    def rows() -> Iterator[dict[str, Any]]:
        for (name, lengths), window, count in product(corpora.items(), (1024, 4096, 131072), (4, 16)):
            documents = Documents(lengths=lengths)
            found = {policy: attempted(documents, policy, count, steps, window) for policy in COMPARED}
            yield {"corpus": name, "window": window, "micro_batches": count, **found}

    columns = {"corpus": "{corpus}", "window": "{window}", "N": "{micro_batches}"}
    columns |= {policy: f"{{{policy}[shown]}}" for policy in COMPARED}
    save("packing_never_worse", machine() | {"steps": steps, "rows": show(columns, rows())})


def attempted(
    documents: Documents, policy: str, micro_batches: int, steps: int, window: int
) -> dict[str, Any]:
    """What `measure` finds and what was warned of (`*`), or why the policy refuses."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            figures = measure(documents, policy, micro_batches, steps, window)
        except PlanError as error:  # too many long documents for the window
            return {"shown": "refused", "why": str(error)}
    shown = "{imbalance_mean:.4f}, p95 {imbalance_p95:.4f}, delay {delay_mean:.2f}".format_map(figures)
    return {"shown": shown + "*" * bool(said), **figures, "said": [str(one.message) for one in said]}


@main.command()
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Where 12 GB can be written.")
@click.option("--documents", default=1_000_000_000, show_default=True)
def billion(folder: Path, documents: int) -> None:
    """Opening and planning over a billion documents: seconds and memory of a process.

    Writes indexes of 10^9 documents (4 GB of lengths in Megatron's form, 8 GB of ends in datatrove's; the
    tokens are files of holes, since planning reads none), then opens each in a fresh process and plans with
    N = 64. What is printed is processor time; memory is told apart: `own` is what the process holds for
    itself, `shared` are pages of the index, of which all processes of a machine share one copy.
    """
    write_indexes(folder, documents)
    columns = {
        "index": "{index}",
        "documents": "{documents:,}",
        "opened and first plan, s": "{first_plan_seconds:.1f} ({first_plan_wall_seconds:.1f} of wall time)",
        "a later step, ms": "{step_ms:.1f}",
        "own memory, GiB": "{own_gib:.3f}",
        "shared pages, GiB": "{shared_gib:.1f}",
    }
    paths = [folder / "megatron", folder / "trove"]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as fresh:
        rows = show(columns, fresh.map(opened, paths))
    save("packing_billion", machine() | {"rows": rows})


def write_indexes(folder: Path, documents: int) -> None:
    """megatron.idx and .bin, trove/0.ds and its index; leaves alone what is there."""
    if (folder / "written").exists():
        return
    drawn = synthetic_lengths(DRAWN).astype(np.int32)
    rng = np.random.default_rng(0)
    (folder / "trove").mkdir(parents=True, exist_ok=True)
    with (
        (folder / "megatron.idx").open("wb") as lengths,
        (folder / "trove" / "0.ds.index").open("wb") as ends,
    ):
        lengths.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, 0))
        total = 0
        for begin in range(0, documents, DRAWN):
            block = np.roll(drawn, rng.integers(DRAWN))[: documents - begin]
            lengths.write(block.tobytes())
            ends.write((np.cumsum(block, dtype=np.int64) + total).tobytes())
            total += int(block.sum(dtype=np.int64))
        # First bytes of sequences, which are documents: holes, but for the last, which tells the size.
        lengths.seek(8 * documents - 8, os.SEEK_CUR)
        lengths.write(struct.pack("<q", 2 * (total - int(block[-1]))))
    for path in (folder / "megatron.bin", folder / "trove" / "0.ds"):
        with path.open("wb") as file:
            file.truncate(2 * total)
    (folder / "written").touch()


def memory() -> tuple[float, float]:
    """GiB that are this process' own, and GiB of mapped files that it shares."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    own, shared = (int(fields[name].split()[0]) / 2**20 for name in ("RssAnon", "RssFile"))
    return own, shared


def opened(path: Path) -> dict[str, Any]:
    """A corpus that is opened and planned over in this process."""
    before, begin, wall = memory()[0], time.process_time(), time.perf_counter()
    corpus = Corpus.open(path)
    documents = Documents(lengths=corpus.lengths, fingerprint=corpus.fingerprint)
    planner = planner_of(documents, "wlb_lazy", 64)
    planner.next()
    first, wall = time.process_time() - begin, time.perf_counter() - wall
    steps = []
    for _ in range(200):
        begin = time.process_time()
        planner.next()
        steps.append((time.process_time() - begin) * 1e3)
    own, shared = memory()
    return {
        "index": path.name,
        "documents": len(corpus),
        "tokens": corpus.lengths.sum(),
        "first_plan_seconds": first,
        "first_plan_wall_seconds": wall,
        "step_ms": float(np.mean(steps)),
        "own_gib": own - before,
        "shared_gib": shared,
    }


if __name__ == "__main__":
    main()
