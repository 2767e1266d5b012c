"""Packing without training: balance, delay, plan time, very many documents, and preparing a corpus.

    python benchmarks/packing.py scale
    python benchmarks/packing.py never-worse --files FILES    # after `wlb-titan prepare FILES`
    python benchmarks/packing.py billion --folder FOLDER
    python benchmarks/packing.py prepare --folder FOLDER

Lengths and work are those of common.py. Each command prints its rows and writes results/cpu/packing_*.json.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np
from common import WINDOW, planner_of, save, synthetic_lengths

from wlb_titan.corpus import Corpus
from wlb_titan.corpus.prepare import PrepareSettings, prepare_corpus
from wlb_titan.corpus.sources import SourceSpec, open_source
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.packing import POLICIES
from wlb_titan.plan import Plan
from wlb_titan.summary import Summary

FOLDER = click.Path(path_type=Path)


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
def scale() -> None:
    """Balance, delay and plan time as the job grows: N = 4, 64 and 2048 micro-batches a step, window 128K.

    With N = 64 a step has about 5,700 documents, with N = 2048 about 180,000.
    """
    rows = []
    shown = ("imbalance_mean", "imbalance_p95", "delay_mean", "delay_max", "documents", "plan_ms", "cpu_ms")
    print(f"{'N':>6} {'policy':14}" + "".join(f"{name:>16}" for name in shown))
    for micro_batches, steps in {4: 2000, 64: 400, 2048: 48}.items():
        # Two epochs for the longest run; more documents would only take more memory.
        lengths = synthetic_lengths(min(4_000_000, micro_batches * 91 * steps))
        for policy in ("plain", "fixed_greedy", "wlb", "wlb_lazy"):
            figures = measure(Documents(lengths=lengths, seed=None), policy, micro_batches, steps)
            cells = "".join(f"{figures[name]:16,.4g}" for name in shown)
            print(f"{micro_batches:6} {policy:14}{cells}", flush=True)
            rows.append({"micro_batches": micro_batches, "policy": policy, **figures})
    save("packing_scale", {"rows": rows})


def measure(
    documents: Documents, policy: str, micro_batches: int, steps: int, window: int = WINDOW
) -> dict[str, Any]:
    """Plans `steps` steps, after eight in which queues fill, and sums them up.

    Returns:
        `Summary.figures`, with `plan_ms` the median and `plan_ms_mean` the mean of wall time; `cpu_ms`, the
        median of the thread's CPU time, which other load on the machine does not change; `documents`, the
        median number of documents of a step.
    """
    planner = planner_of(documents, POLICIES.configure(policy), micro_batches=micro_batches, window=window)
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
    policies = ("plain", "wlb", "wlb_lazy")
    rows = []
    print(f"{'corpus':18}{'window':>8}{'N':>4}" + "".join(f"{p:>20}{'delay':>7}" for p in policies))
    for name, lengths in corpora.items():
        for window in (1024, 4096, 131072):
            for micro_batches in (4, 16):
                row: dict[str, Any] = {"corpus": name, "window": window, "micro_batches": micro_batches}
                line = f"{name:18}{window:8}{micro_batches:4}"
                for policy in policies:
                    try:
                        with warnings.catch_warnings(record=True) as said:
                            warnings.simplefilter("always")
                            figures = measure(
                                Documents(lengths=lengths), policy, micro_batches, steps, window
                            )
                    except PlanError as error:  # too many long documents for the window
                        row[policy] = str(error)
                        line += f"{'error':>20}{'':7}"
                        continue
                    row[policy] = {**figures, "said": [str(warning.message) for warning in said]}
                    mark = "!" if said else " "
                    both = f"{figures['imbalance_mean']:.4f} {figures['imbalance_p95']:.4f}{mark}"
                    line += f"{both:>20}{figures['delay_mean']:7.2f}"
                print(line, flush=True)
                rows.append(row)
    save("packing_never_worse", {"steps": steps, "rows": rows})


DRAWN = 10_000_000  # lengths that are repeated, in another order each time


@main.command()
@click.option("--folder", type=FOLDER, required=True, help="Where 12 GB can be written.")
@click.option("--documents", default=1_000_000_000, show_default=True)
def billion(folder: Path, documents: int) -> None:
    """Opening and planning over a billion documents: seconds and memory of a process.

    Writes indexes of 10^9 documents (4 GB of lengths in Megatron's form, 8 GB of ends in datatrove's; the
    tokens are files of holes, since planning reads none), then opens each in a fresh process and plans with
    N = 64. What is printed is processor time; memory is told apart: `own` is what the process holds for
    itself, `shared` are pages of the index, of which all processes of a machine share one copy. As a
    baseline, `stored` has the lengths as an int64 array of the process' own and the order of an epoch as
    another, for a tenth of the documents, as ten times as many do not fit into this machine's memory.
    """
    write_indexes(folder, documents)
    rows = []
    for name in ("stored", "megatron", "trove"):
        measured, *given = (stored, folder, documents // 10) if name == "stored" else (opened, folder / name)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            rows.append({"corpus": name} | fresh.submit(measured, *given).result())
        print(json.dumps(rows[-1]), flush=True)
    save("packing_billion", {"rows": rows})


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


def stored(folder: Path, count: int) -> dict[str, Any]:
    """Lengths and order as arrays of this process."""
    before, begin = memory()[0], time.process_time()
    lengths = np.fromfile(folder / "megatron.idx", np.int32, count, offset=34).astype(np.int64)
    order = np.arange(count, dtype=np.int32)
    np.random.default_rng((0, 0)).shuffle(order)
    ends = np.cumsum(lengths[order])
    seconds, own = time.process_time() - begin, memory()[0] - before
    return {"documents": count, "open_seconds": seconds, "own_gib": own, "tokens": int(ends[-1])}


def opened(path: Path) -> dict[str, Any]:
    """A corpus that is opened and planned over in this process."""
    before, begin, wall = memory()[0], time.process_time(), time.perf_counter()
    corpus = Corpus.open(path)
    open_seconds = time.process_time() - begin
    documents = Documents(lengths=corpus.lengths, fingerprint=corpus.fingerprint)
    planner = planner_of(documents, POLICIES.configure("wlb_lazy"), micro_batches=64)
    made = time.process_time() - begin
    planner.next()
    first, wall = time.process_time() - begin, time.perf_counter() - wall
    steps = []
    for _ in range(200):
        begin = time.process_time()
        planner.next()
        steps.append((time.process_time() - begin) * 1e3)
    own, shared = memory()
    return {
        "documents": len(corpus),
        "tokens": corpus.lengths.sum(),
        "open_seconds": open_seconds,
        "planner_seconds": made,
        "first_plan_seconds": first,
        "first_plan_wall_seconds": wall,
        "step_ms": float(np.mean(steps)),
        "step_ms_median": float(np.median(steps)),
        "own_gib": own - before,
        "shared_gib": shared,
    }


MAP = """
import sys
import datasets
from wlb_titan.corpus.tokenizer import CorpusTokenizer
from pathlib import Path

folder, workers = Path(sys.argv[1]), int(sys.argv[2])
tokenizer = CorpusTokenizer(folder / "tokenizer")
end = tokenizer.end_of_text_id

def tokenize(batch):
    return {"input_ids": [[*ids, end] for ids in tokenizer.encode(batch["text"])]}

files = sorted(str(path) for path in (folder / "texts").glob("*.jsonl"))
texts = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(folder / "cache"))
features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
columns = texts.column_names
tokens = texts.map(tokenize, batched=True, remove_columns=columns, num_proc=workers, features=features)
tokens.save_to_disk(str(folder / "mapped"))
"""


@main.command()
@click.option("--folder", type=FOLDER, required=True, help="Where to work; must not exist.")
@click.option("--characters", default=100_000_000, show_default=True, help="Text to tokenize.")
def prepare(folder: Path, characters: int) -> None:
    """Tokens a second of preparing a corpus, beside `datasets.map`.

    The text is that of Python files of this machine, as JSON lines in eight files; the tokenizer is one of
    4,096 entries, the same for all. Each way runs in a process of its own, and what is counted is processor
    time, its own and its children's (which are forked to be counted), as wall time depends on other load on
    the machine.
    """
    write_texts(folder, characters)
    command = ["-m", "wlb_titan.commands.main", "prepare", str(folder / "one")]
    command += ["--source", f"jsonl:{folder / 'texts'}", "--tokenizer", str(folder / "tokenizer")]
    rows = [
        prepared("datasets.map, 2 processes", ["-c", MAP, str(folder), "2"], folder / "mapped"),
        prepared("prepare", command, folder / "one"),
    ]
    save("packing_prepare", {"characters": characters, "rows": rows})


def write_texts(folder: Path, characters: int) -> None:
    """Eight files of JSON lines, and a tokenizer."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    source = open_source(SourceSpec("python-source"), folder / "cache")
    files = [(texts / f"{number}.jsonl").open("w") for number in range(8)]
    for document in range(len(source)):
        try:
            text = source.read(document)
        except ValueError:
            continue
        files[document % len(files)].write(json.dumps({"text": text}) + "\n")
        characters -= len(text)
        if characters < 0:
            break
    for file in files:
        file.close()
    prepare_corpus(PrepareSettings(source=f"jsonl:{texts}", max_tokens=1000), folder / "trained")
    (folder / "trained" / "tokenizer").rename(folder / "tokenizer")


def prepared(name: str, arguments: list[str], result: Path) -> dict[str, Any]:
    """Runs a command; its wall and processor seconds, and tokens a second of each."""
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment)
    wall = time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    tokens = Corpus.open(result).lengths.sum()
    row = {
        "way": name,
        "tokens": tokens,
        "seconds": wall,
        "processor_seconds": processor,
        "tokens_per_second": tokens / wall,
        "tokens_per_processor_second": tokens / processor,
    }
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
