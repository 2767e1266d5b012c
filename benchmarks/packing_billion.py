"""Opening and planning over a billion documents: seconds and memory of a process.

    python benchmarks/packing_billion.py --folder FOLDER

Writes indexes of 10^9 documents (4 GB of lengths in Megatron's form, 8 GB of ends in datatrove's; the tokens
are files of holes, since planning reads none), then opens each in a fresh process and plans with N = 64. What
is printed is processor time; memory is told apart: `own` is what the process holds for itself, `shared` are
pages of the index, of which all processes of a machine share one copy. As a baseline, `stored` has the
lengths as an int64 array of the process' own and the order of an epoch as another, for a tenth of the
documents, as ten times as many do not fit into this machine's memory.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from common.packing import planner_of, save, synthetic_lengths

from wlb_titan.corpus import Corpus
from wlb_titan.documents import Documents
from wlb_titan.packing import POLICIES

DRAWN = 10_000_000  # lengths that are repeated, in another order each time
STEPS = 200


def write(folder: Path, documents: int) -> None:
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
        lengths.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
        total = 0
        for begin in range(0, documents, DRAWN):
            block = np.roll(drawn, rng.integers(DRAWN))[: documents - begin]
            lengths.write(block.tobytes())
            ends.write((np.cumsum(block, dtype=np.int64) + total).tobytes())
            total += int(block.sum(dtype=np.int64))
        # First bytes and documents' sequences: holes, but for the last ones, which tell the size.
        lengths.seek(8 * documents - 8, os.SEEK_CUR)
        lengths.write(struct.pack("<q", 2 * (total - int(block[-1]))))
        lengths.seek(8 * documents, os.SEEK_CUR)
        lengths.write(struct.pack("<q", documents))
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


def measure(kind: str, path: Path, count: int) -> dict[str, Any]:
    """Opens and plans in this process."""
    before, begin, wall = memory()[0], time.process_time(), time.perf_counter()
    if kind == "stored":
        lengths: Any = np.fromfile(path / "megatron.idx", np.int32, count, offset=34).astype(np.int64)
        order = np.arange(count, dtype=np.int32)
        np.random.default_rng((0, 0)).shuffle(order)
        ends = np.cumsum(lengths[order])
        own = memory()[0] - before
        return {
            "corpus": kind,
            "documents": count,
            "open_seconds": time.process_time() - begin,
            "own_gib": own,
            "tokens": int(ends[-1]),
        }
    corpus = Corpus.open(path / kind)
    opened = time.process_time() - begin
    documents = Documents(lengths=corpus.lengths, fingerprint=corpus.fingerprint)
    planner = planner_of(documents, POLICIES.configure("wlb_lazy"), micro_batches=64)
    made = time.process_time() - begin
    planner.next()
    first, wall = time.process_time() - begin, time.perf_counter() - wall
    steps = []
    for _ in range(STEPS):
        begin = time.process_time()
        planner.next()
        steps.append((time.process_time() - begin) * 1e3)
    own, shared = memory()
    return {
        "corpus": kind,
        "documents": len(corpus),
        "tokens": corpus.lengths.sum(),
        "open_seconds": opened,
        "planner_seconds": made,
        "first_plan_seconds": first,
        "first_plan_wall_seconds": wall,
        "step_ms": float(np.mean(steps)),
        "step_ms_median": float(np.median(steps)),
        "own_gib": own - before,
        "shared_gib": shared,
    }


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Where 12 GB can be written.")
@click.option("--documents", default=1_000_000_000, show_default=True)
@click.option("--kind", hidden=True)
def main(folder: Path, documents: int, kind: str | None) -> None:
    """Open and plan over very many documents, each kind of index in a process of its own."""
    if kind is not None:
        print(json.dumps(measure(kind, folder, documents)))
        return
    write(folder, documents)
    rows = []
    for name, count in (("stored", documents // 10), ("megatron", documents), ("trove", documents)):
        command = [
            sys.executable,
            __file__,
            "--folder",
            str(folder),
            "--documents",
            str(count),
            "--kind",
            name,
        ]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows.append(json.loads(answer))
        print(answer, end="", flush=True)
    save("packing_billion", {"rows": rows})


if __name__ == "__main__":
    main()
