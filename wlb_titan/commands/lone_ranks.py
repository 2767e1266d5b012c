"""Ranks of a big job, each alone in a process of its own: what `dryrun` and `rehearse` share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wlb_titan.commands.console import print_choice
from wlb_titan.commands.options import writing
from wlb_titan.errors import UserError

if TYPE_CHECKING:
    from wlb_titan.config import Resolved
    from wlb_titan.documents import Documents
    from wlb_titan.job import Job

DEFAULT_RANKS = "first,last"
DEFAULT_STEP = 9
"""By then the queues of balancing policies have filled."""

PROCESS = "wlb_titan.runtime.one_rank.process"

SYNTHETIC_TOKENS = 1 << 26
"""At most so many, of a corpus that stands for one that is not here: 256 MiB on the disk, for a moment."""


rank_option = click.option(
    "--rank",
    "ranks",
    default=DEFAULT_RANKS,
    metavar="N,...",
    help="Global ranks to run, each in a process of its own: numbers, first and last of the job, all-stages "
    "(one of each pipeline rank), all.",
)
world_size_option = click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="GPUs of the job; by default as many as the configured degrees need.",
)


@dataclass(frozen=True)
class RankCommand:
    """What a process runs that is one rank.

    Attributes:
        trainer: "dryrun" or "rehearse", as `wlb_titan.runtime.one_rank.process` knows them.
        options: that trainer's keywords.
        file: TOML file.
        words: overrides of the configuration.
        environment: variables over those of this process.
        limit: seconds after which the process is stopped; None: never.
        running: the processes that were started.
    """

    trainer: str
    options: Mapping[str, Any]
    file: Path
    words: list[str]
    environment: Mapping[str, str]
    limit: float | None = None
    running: list[subprocess.Popen[str]] = field(default_factory=list, init=False)

    def run(self, ranks: Sequence[int], folder: Path, at_once: int) -> list[dict[str, Any]]:
        """Runs it for each rank and returns their results; `error` of one says what went wrong.

        No process outlives it, whatever ends it; SIGTERM does so as Ctrl-C would.
        """
        former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        with ThreadPoolExecutor(at_once) as pool:
            try:
                return list(pool.map(lambda rank: self._run(rank, folder), ranks))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in self.running:
                    process.kill()
                raise
            finally:
                signal.signal(signal.SIGTERM, former)

    def _run(self, rank: int, folder: Path) -> dict[str, Any]:
        result = folder / f"rank{rank}.json"
        result.unlink(missing_ok=True)
        asked = {
            "run": self.trainer,
            "rank": rank,
            "file": str(self.file),
            "overrides": self.words,
            "result": str(result),
            **self.options,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", PROCESS, json.dumps(asked)],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(self.environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            self.running.append(process)
            try:
                tail = process.communicate(timeout=self.limit)[1].strip()[-2000:]
                error = f"the process ended with exit code {process.returncode}: {tail}" * (
                    process.returncode != 0
                )
            except subprocess.TimeoutExpired:
                process.kill()
                error = f"the process was stopped after {self.limit:.0f} s"
        found: dict[str, Any] = {"rank": rank}
        if result.exists():
            found = json.loads(result.read_text(encoding="utf-8"))
        return found if "error" in found or not error else {**found, "error": error}


def decided_job(
    file: Path, words: Sequence[str], world_size: int | None, memory: float | None = None
) -> tuple[Job, Documents]:
    """The job of a file with overrides, at so many processes, and its documents; of `auto`, what it chooses.

    Args:
        memory: bytes of a GPU, if not the cluster's.
    """
    from wlb_titan.config.documents import training_documents
    from wlb_titan.runtime.models.load import load_config
    from wlb_titan.simulator.choice import choose

    config = load_config(file, words, world_size).config
    job, documents = configured_job(config, world_size, memory), training_documents(config.wlb)
    if not job.undecided:
        return job, documents
    choice = choose(job, documents)
    print_choice(choice)
    return choice.job, documents


def configured_job(config: Any, world_size: int | None, memory: float | None = None) -> Job:
    """The job of a configuration, with `auto` in it where it was written; `memory` as of `decided_job`."""
    from wlb_titan.runtime.job import degrees_product, job_of, parallel_dims

    job = job_of(config, parallel_dims(config, world_size or degrees_product(config)))
    return job if memory is None else job.on(replace(job.cluster, memory=memory))


def write_json(output: Path, results: Any) -> None:
    """Writes what `--output` asks for."""
    with writing(f"--output: {output}"):
        output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def policy_words(parts: Sequence[str]) -> list[str]:
    """Overrides that set packing, sharding and order, as far as they are given; the packing is trained then,
    and no shadow."""
    keys = ("--wlb.packing.policy", "--wlb.sharding.policy", "--wlb.pipeline.order")
    words = [word for key, part in zip(keys, parts, strict=False) for word in (key, part)]
    return [*words, "--wlb.packing.shadow", "false"] if parts else []


def rank_numbers(ranks: str, world_size: int, stages: int) -> list[int]:
    """The global ranks that `--rank` names, in its order.

    Args:
        ranks: numbers and these words, with commas between them: first, last, all-stages (the first rank of
            each pipeline rank), all.
    """
    named = {
        "first": [0],
        "last": [world_size - 1],
        "all-stages": list(range(0, world_size, world_size // stages)),
        "all": list(range(world_size)),
    }
    numbers = []
    for word in map(str.strip, ranks.split(",")):
        if word.isascii() and word.isdigit() and int(word) < world_size:
            numbers.append(int(word))
        elif word in named:
            numbers += named[word]
        else:
            raise UserError(
                f"--rank: {word!r} is none of the job's {world_size} ranks; name numbers from 0 to "
                f"{world_size - 1}, {', '.join(named)}, with commas between them."
            )
    return list(dict.fromkeys(numbers))


def corpus_words(resolved: Resolved, micro_batches: int, step: int, folder: Path) -> list[str]:
    """Overrides that name a corpus: the configured one, or synthetic lengths if it is not on this machine.

    Args:
        micro_batches: micro-batches of the whole job in a step.
        step: step of the plan that is reached.
    """
    from wlb_titan.corpus.writer import SHAPE, long_tailed_lengths, write_synthetic_corpus
    from wlb_titan.runtime.checks.files import validate_corpus

    corpus = resolved.config.wlb.corpus
    paths = [source.path for source in corpus.sources] or [corpus.path]
    # Megatron's files are named without their endings.
    missing = [path for path in paths if not (Path(path).exists() or Path(f"{path}.bin").exists())]
    if not missing:
        resolved.check(validate_corpus)
        return []
    click.echo(
        f"There is no corpus at {', '.join(missing)}: planning on synthetic lengths instead, {SHAPE}. The "
        "job's own plan needs its corpus here (`wlb-titan prepare`).",
        err=True,
    )
    window = resolved.config.training.seq_len
    tokens = min((step + 1) * micro_batches * window, SYNTHETIC_TOKENS)
    write_synthetic_corpus(folder / "corpus", long_tailed_lengths(tokens, window))
    alone = ["--wlb.corpus.sources", "[]"] if corpus.sources else []
    path = str(folder / "corpus")
    return ["--wlb.corpus.path", path, "--wlb.corpus.tokenizer", "", "--wlb.corpus.mask", "auto", *alone]
