"""Ranks of a big job, each alone in a process of its own: what `dryrun` and `rehearse` share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from wlb_titan.commands import command_line as cli
from wlb_titan.cost.cluster import UNKNOWN, cluster_of_device
from wlb_titan.errors import UserError
from wlb_titan.job import Policy
from wlb_titan.runtime.models.load import Loaded
from wlb_titan.runtime.one_rank import results
from wlb_titan.simulator.choice import choose

DEFAULT_RANKS = "first,last"
DEFAULT_STEP = 9  # by then the queues of balancing policies have filled

SYNTHETIC_TOKENS = 1 << 26
"""At most, in a corpus that stands in for one that is not here: 256 MiB on the disk, for a moment."""


def of_ranks(command: cli.Command) -> cli.Command:
    """The options `ranks`, `world_size`, `step` and `output`."""
    rank = click.option(
        "--rank",
        "ranks",
        default=DEFAULT_RANKS,
        metavar="N,...",
        help="Ranks to run, each in its own process: rank numbers, or first, last, all-stages (one rank per "
        "pipeline stage), all.",
    )
    step = click.option("--step", type=cli.POSITIVE, metavar="N", help="First step of the plan to run.")
    return rank(cli.world_size_option(step(cli.json_option(command))))


def lone_job(
    file: Path,
    overrides: Sequence[str],
    world_size: int | None,
    folder: Path,
    *,
    steps: int,
    policy: Policy | None = None,
    memory: float | None = None,
) -> cli.Asked:
    """The file's job, with `auto` decided. If its corpus is not here, one of synthetic lengths in the folder
    takes its place for so many `steps`. `policy` and `memory` replace the file's and the cluster's bytes."""
    from wlb_titan.config.documents import training_documents

    # A lone rank does not validate, so the documents for it need not be here.
    words = [*overrides, "--dump_folder", str(folder), "--wlb.validation.every", "0"]
    words += ["--wlb.policy", str(policy)] if policy else []
    loaded = cli.load(file, words, world_size)
    job = loaded.job
    if memory is not None:
        job = job.on(replace(job.cluster, kind="gpu", memory=memory))
    job = loaded.told(job)
    if synthetic := _synthetic_corpus(loaded, steps, folder):
        loaded = cli.load(file, [*words, *synthetic], world_size)
    documents = training_documents(loaded.config.wlb)
    if job.undecided:
        with cli.progress() as report:
            choice = choose(job, documents, report=report)
        cli.print_choice(choice)
        job = choice.job
    return cli.Asked(job, documents, loaded)


def run_ranks(
    asked: cli.Asked, kind: str, ranks: Sequence[int], at_once: int, **options: Any
) -> list[dict[str, Any]]:
    """Results by rank, with `error` where one failed; kind and options are those of
    `wlb_titan.runtime.one_rank.process`."""
    job, loaded, wlb = asked.job, asked.loaded, asked.loaded.config.wlb
    words = [*loaded.overrides, "--wlb.policy", str(job.policy)]
    if kind == "dryrun" and not wlb.cluster:
        from wlb_titan.runtime.configured import gpu_at_hand

        if gpu := gpu_at_hand(wlb.device):  # which they are not to see
            words += ["--wlb.cluster", cluster_of_device(gpu[0]) or UNKNOWN]
    same = {"run": kind, "file": str(loaded.file), "overrides": words, "world_size": job.degrees.ranks}
    # Tensors of a dry run have no memory, and its trace is of the CPU. A job may want the CPU beside a GPU.
    on_cpu = kind == "dryrun" or wlb.device == "cpu"
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with cli.progress() as report:
            each = [{**same, "rank": rank, **options} for rank in ranks]
            what = f"Running ranks, {job.policy}"
            return results(each, at_once, on_cpu=on_cpu, report=report, what=what)
    finally:
        signal.signal(signal.SIGTERM, former)


def print_rank(result: dict[str, Any], world_size: int, said: Callable[[dict[str, Any]], str]) -> None:
    """Prints what is `said` of a rank that came through, or its error."""
    name = f"\nRank {result['rank']} of {world_size}"
    if "error" in result:
        cli.say(f"{name} fails:", f"{result.get('traceback', '')}{result['error']}")
    else:
        place = ", ".join(f"{axis} {number}" for axis, number in result["coordinates"].items()) or "alone"
        cli.say(f"{name} ({place}){said(result)}")


def rank_numbers(ranks: str, world_size: int, stages: int) -> list[int]:
    """The global ranks that `--rank` names, in its order."""
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
                f"--rank: {word!r} is not one of the job's {world_size} ranks; give a comma-separated list "
                f"of numbers from 0 to {world_size - 1}, {', '.join(named)}."
            )
    return list(dict.fromkeys(numbers))


def _synthetic_corpus(loaded: Loaded, steps: int, folder: Path) -> list[str]:
    """Overrides that name a corpus of synthetic lengths, enough for so many steps of the whole job; none if
    the configured corpus is on this machine."""
    from wlb_titan.prepare.prepare import SHAPE, long_tailed_lengths, write_synthetic_corpus
    from wlb_titan.runtime.checks import validate_corpus

    corpus = loaded.config.wlb.corpus
    paths = [source.path for source in corpus.sources] or [corpus.path]
    # Megatron's files are named without their suffixes.
    missing = [path for path in paths if not (Path(path).exists() or Path(f"{path}.bin").exists())]
    if not missing:
        loaded.check(validate_corpus)
        return []
    path = folder / "corpus"
    if not path.exists():  # of another policy
        click.echo(
            f"There is no corpus at {', '.join(missing)}: planning on synthetic lengths instead, {SHAPE}. "
            "The job's own plan needs its corpus here (`wlb-titan prepare`).",
            err=True,
        )
        job = loaded.job
        tokens = min((steps + 1) * job.micro_batches * job.window, SYNTHETIC_TOKENS)
        write_synthetic_corpus(path, long_tailed_lengths(tokens, job.window))
    alone = ["--wlb.corpus.sources", "[]"] if corpus.sources else []
    words = {"path": str(path), "column": "input_ids", "tokenizer": "", "mask": "auto"}
    return [word for name, value in words.items() for word in (f"--wlb.corpus.{name}", value)] + alone
