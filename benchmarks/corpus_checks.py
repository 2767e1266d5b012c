"""What checksums cost: opening a prepared corpus, and reading all its documents, with and without them.

    python benchmarks/corpus_checks.py CORPUS

Both ways take turns in one process, on files in the page cache. The first reading compares blocks; later ones
only look that they were.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import click
import numpy as np

from wlb_titan.corpus.arrow import ArrowShard
from wlb_titan.corpus.manifest import Manifest

ROUNDS = 7


@click.command()
@click.argument("corpus", type=click.Path(path_type=Path))
def main(corpus: Path) -> None:
    files = [corpus / name for name in Manifest.load(corpus).document_files]
    times: dict[tuple[str, bool], list[float]] = {}
    for _ in range(ROUNDS):
        for checked in (False, True):
            for what, seconds in measure(files, checked).items():
                times.setdefault((what, checked), []).append(seconds)
    tokens = Manifest.load(corpus).tokens
    click.echo(f"{tokens:,} tokens; median of {ROUNDS}")
    for what in ("open", "lengths", "read first", "read again"):
        without, with_ = (statistics.median(times[what, checked]) for checked in (False, True))
        click.echo(f"{what:11} without {without * 1e3:9.3f} ms, with checksums {with_ * 1e3:9.3f} ms")


def measure(files: list[Path], checked: bool) -> dict[str, float]:
    """Seconds of each part, all files together."""
    seconds = {}
    begin = time.perf_counter()
    shards = [ArrowShard(file, checked=checked) for file in files]
    seconds["open"] = time.perf_counter() - begin
    begin = time.perf_counter()
    lengths = [shard.run_of_lengths(0, shard.documents) for shard in shards]
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
