"""What checks cost: opening a prepared corpus, reading all its documents, and training on it.

    python benchmarks/corpus_checks.py CORPUS [--steps 100]

With checksums and without, the two take turns, on files in the page cache. The first reading compares blocks;
later ones only look that they were. Training is that of `llama3_debug` on one CPU core, each run in a process
forked from this one; the copy of the corpus without checksums is one of format version 2. Where the machine
does anything else, steps differ by more than the checks cost, so their share of a step is also computed from
what reading costs. Besides, how long the alarm's thread needs for its look, which it takes once a second.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import click
import numpy as np

from wlb_titan.corpus.arrow import BATCHES, SUMS, ArrowShard
from wlb_titan.corpus.corpus import Corpus
from wlb_titan.corpus.manifest import MANIFEST_FILE, Manifest

ROUNDS = 7
OPENINGS = 100
SEQ_LEN = 512
TRAININGS = 3
LOOKS = 2000

CONFIG = """
base = "llama3_debug"
[training]
seq_len = {seq_len}
local_batch_size = 1
steps = {steps}
[metrics]
log_freq = 1
[wlb]
device = "cpu"
[wlb.corpus]
path = "{corpus}"
[debug]
seed = 0
enable_structured_logging = false
"""


@click.command()
@click.argument("corpus", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(0), default=100, show_default=True, help="Of each training.")
def main(corpus: Path, steps: int) -> None:
    files = [corpus / name for name in Manifest.load(corpus).document_files]
    times: dict[tuple[str, bool], list[float]] = {}
    for _ in range(ROUNDS):
        for checked in (False, True):
            for what, seconds in measure(files, checked).items():
                times.setdefault((what, checked), []).append(seconds)
    tokens = Manifest.load(corpus).tokens
    first = statistics.median(times["read first", True]) - statistics.median(times["read first", False])
    click.echo(f"{tokens:,} tokens; median of {ROUNDS}")
    for what in ("open", "lengths", "read first", "read again"):
        without, with_ = (statistics.median(times[what, checked]) for checked in (False, True))
        click.echo(f"{what:11} without {without * 1e3:9.3f} ms, with checksums {with_ * 1e3:9.3f} ms")
    if steps:
        with tempfile.TemporaryDirectory() as folder:
            _print_training(corpus, Path(folder), steps, first / tokens)


def _print_training(corpus: Path, folder: Path, steps: int, token: float) -> None:
    plain = without_checksums(corpus, folder / "plain")
    both = ((False, plain), (True, corpus.absolute()))
    opened: dict[bool, list[float]] = {False: [], True: []}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(OPENINGS):
        for checked, path in both:
            begin = time.perf_counter()
            Corpus.open(path)
            opened[checked].append(time.perf_counter() - begin)
    warm_up()
    for number in range(TRAININGS):
        for checked, path in both:
            seconds[checked] += train(path, folder / f"run-{number}-{checked}", steps)
    for what, times in (("whole open", opened), ("step", seconds)):
        before, after = (statistics.median(times[checked]) * 1e3 for checked in (False, True))
        click.echo(
            f"{what:11} without {before:9.3f} ms, with checksums {after:9.3f} ms: {after / before - 1:+.2%}"
        )
    share = token * SEQ_LEN * 1e3 / before
    click.echo(
        f"checks      {share:.5%} of a step by the time of reading first, {token * 1e9:.2f} ns a token"
    )
    click.echo(f"look        {seconds_of_a_look() * 1e6:.0f} us of the alarm's thread, once a second")


def without_checksums(corpus: Path, folder: Path) -> Path:
    """The same corpus as an earlier version wrote it."""
    endings = (SUMS, BATCHES)
    shutil.copytree(
        corpus, folder, ignore=lambda _, names: [name for name in names if name.endswith(endings)]
    )
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["files"] = {name: size for name, size in manifest["files"].items() if not name.endswith(endings)}
    for key in ("checksums", "manifest_sha256"):
        del manifest[key]
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest | {"format_version": 2}))
    return folder


def warm_up() -> None:
    """Imports what training needs, so that forked processes have it."""
    from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    use_cpu_without_accelerator()


def train(corpus: Path, folder: Path, steps: int) -> list[float]:
    """Seconds of each step but the first ten."""
    folder.mkdir()
    (folder / "train.toml").write_text(CONFIG.format(seq_len=SEQ_LEN, steps=steps, corpus=corpus))
    process = os.fork()
    if process == 0:
        import torch

        from wlb_titan.runtime.train import main as train

        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["MASTER_PORT"] = "0"
        torch.set_num_threads(1)
        try:
            train(["--config", str(folder / "train.toml"), "--dump_folder", str(folder / "dump")])
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    lines = folder / "dump" / "metrics.jsonl"
    if not lines.exists():
        raise click.ClickException((folder / "log").read_text()[-2000:])
    return [json.loads(line)["seconds"] for line in lines.read_text().splitlines()][10:]


def seconds_of_a_look() -> float:
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    begin = time.perf_counter()
    for _ in range(LOOKS):
        store.check(["failed"])
    return (time.perf_counter() - begin) / LOOKS


def measure(files: list[Path], checked: bool) -> dict[str, float]:
    """Seconds of each part, all files together."""
    seconds = {}
    begin = time.perf_counter()
    shards = [ArrowShard(file, checked=checked) for file in files]
    seconds["open"] = time.perf_counter() - begin
    begin = time.perf_counter()
    lengths = [shard.lengths(np.arange(shard.documents)) for shard in shards]
    seconds["lengths"] = time.perf_counter() - begin
    for what in ("read first", "read again"):
        begin = time.perf_counter()
        for shard, own in zip(shards, lengths, strict=True):
            for row, length in enumerate(own.tolist()):
                np.asarray(shard.read(row, 0, length), dtype=np.int64)
        seconds[what] = time.perf_counter() - begin
    return seconds


if __name__ == "__main__":
    main()
