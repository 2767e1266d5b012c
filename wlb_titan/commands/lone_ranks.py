"""Ranks of a big job, each alone in a process of its own: what `dryrun` and `rehearse` share.

It also finds the ranks that do the same in a step, so that `dryrun --rank all` runs each kind once.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from wlb_titan.commands import command_line as cli
from wlb_titan.config.load import Resolved
from wlb_titan.dimensions.degrees import Grid
from wlb_titan.documents import Documents
from wlb_titan.errors import UserError
from wlb_titan.job import Job, Policy
from wlb_titan.plan import LENGTH, MicroBatch, Plan
from wlb_titan.runtime.one_rank import process
from wlb_titan.simulator.calls import RankCalls

DEFAULT_RANKS = "first,last"
DEFAULT_STEP = 9  # by then the queues of balancing policies have filled

SYNTHETIC_TOKENS = 1 << 26
"""At most, in a corpus that stands in for one that is not here: 256 MiB on the disk, for a moment."""

SHARED = ("tp", "dp_replicate", "dp_shard")
"""Axes along which ranks make the same calls in a step, each within its own groups."""


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


@dataclass(frozen=True)
class LoneRanks:
    """Ranks of a job, each to be run in a process of its own."""

    file: Path
    words: list[str]
    """Overrides of the configuration that give a process the `job`."""
    job: Job
    """With `auto` decided."""
    documents: Documents
    on_cpu: bool
    """As the configuration says, though there may be a GPU."""
    folder: Path
    """For what the processes write."""

    @classmethod
    def of(
        cls,
        file: Path,
        overrides: Sequence[str],
        world_size: int | None,
        folder: Path,
        *,
        steps: int,
        policy: Policy | None = None,
        memory: float | None = None,
    ) -> LoneRanks:
        """Those of the file's job. If its corpus is not here, one of synthetic lengths takes its place for
        so many `steps`. `policy` and `memory` replace the file's and the cluster's bytes."""
        from wlb_titan.config.documents import training_documents
        from wlb_titan.runtime.models.load import tracing
        from wlb_titan.simulator.choice import choose

        # A lone rank does not validate, so the documents for it need not be here.
        words = [*overrides, *_under(policy), "--dump_folder", str(folder), "--wlb.validation.every", "0"]
        job, resolved = cli.resolved_job(file, words, world_size)
        if memory is not None:
            job = tracing(file, words, resolved.config)(
                job.on(replace(job.cluster, kind="gpu", memory=memory))
            )
        if synthetic := _synthetic_corpus(resolved, job.micro_batches, steps, folder):
            words += synthetic
            resolved = cli.load(file, words, world_size)
        documents = training_documents(resolved.config.wlb)
        if job.undecided:
            with cli.progress() as report:
                choice = choose(job, documents, report=report)
            cli.print_choice(choice)
            job = choice.job
            words += _under(job.policy)
        return cls(file, words, job, documents, resolved.config.wlb.device == "cpu", folder)

    def plans(self, steps: int, after: int = 0) -> list[Plan]:
        with cli.progress() as report:
            return self.job.plans(self.documents, steps, after, report)

    def run(self, kind: str, ranks: Sequence[int], at_once: int, **options: Any) -> list[dict[str, Any]]:
        """Results by rank, with `error` where one failed; kind and options are those of
        `wlb_titan.runtime.one_rank.process`."""
        asked = {"run": kind, "file": str(self.file), "overrides": self.words, **options}
        asked["world_size"] = self.job.degrees.ranks
        # Tensors of a dry run have no memory, and its trace is of the CPU.
        on_cpu = self.on_cpu or kind == "dryrun"
        former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            with cli.progress() as report:
                each = [{**asked, "rank": rank} for rank in ranks]
                what = f"Running ranks, {self.job.policy}"
                return process.results(each, at_once, on_cpu=on_cpu, report=report, what=what)
        finally:
            signal.signal(signal.SIGTERM, former)


def _under(policy: Policy | None) -> list[str]:
    """Overrides that train under this policy, if there is one."""
    return ["--wlb.policy", str(policy)] if policy else []


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


def _synthetic_corpus(resolved: Resolved, micro_batches: int, steps: int, folder: Path) -> list[str]:
    """Overrides that name a corpus of synthetic lengths, enough for so many steps of the whole job's
    `micro_batches`; none if the configured corpus is on this machine."""
    from wlb_titan.prepare.prepare import SHAPE, long_tailed_lengths, write_synthetic_corpus
    from wlb_titan.runtime.checks import validate_corpus

    corpus = resolved.config.wlb.corpus
    paths = [source.path for source in corpus.sources] or [corpus.path]
    # Megatron's files are named without their suffixes.
    missing = [path for path in paths if not (Path(path).exists() or Path(f"{path}.bin").exists())]
    if not missing:
        resolved.check(validate_corpus)
        return []
    path = folder / "corpus"
    if not path.exists():  # of another policy
        click.echo(
            f"There is no corpus at {', '.join(missing)}: planning on synthetic lengths instead, {SHAPE}. "
            "The job's own plan needs its corpus here (`wlb-titan prepare`).",
            err=True,
        )
        window = resolved.config.training.seq_len
        tokens = min((steps + 1) * micro_batches * window, SYNTHETIC_TOKENS)
        write_synthetic_corpus(path, long_tailed_lengths(tokens, window))
    alone = ["--wlb.corpus.sources", "[]"] if corpus.sources else []
    words = {"path": str(path), "column": "input_ids", "tokenizer": "", "mask": "auto"}
    return [word for name, value in words.items() for word in (f"--wlb.corpus.{name}", value)] + alone


def alike(job: Job, plan: Plan) -> dict[int, int]:
    """For each global rank, the first one that does the same in a step.

    Tensor-parallel ranks always do. Data-parallel ranks do where their micro-batches agree, one by one, in
    length and in all that context parallelism exchanges.
    """
    first: dict[object, int] = {}
    representative = {}
    for rank in range(job.degrees.ranks):
        place = job.degrees.grid.place(rank)
        apart = tuple(number for axis, number in place.items() if axis not in SHARED)
        replica = job.degrees.replica_at(place)
        packs = plan.of_rank(replica)
        flow = None if plan.flows is None else plan.flows[replica]
        merged = replica if any(pack.merged for pack in packs) else None
        steps = tuple(_shapes(job, pack, replica, place["cp"]) for pack in packs)
        representative[rank] = first.setdefault((apart, steps, flow, merged), rank)
    return representative


def _shapes(job: Job, pack: MicroBatch, replica: int, context_rank: int) -> tuple[object, ...]:
    """All that decides the sizes of a rank's calls for a micro-batch."""
    strategy = job.by_sharers[pack.sharers].strategy
    if strategy is None or pack.ranks is None:
        return (pack.length,)
    before = replica - pack.merged.start if pack.merged else 0
    rank = before * job.degrees.context + context_rank
    lengths = pack.documents[:, LENGTH]
    mask = strategy.mask(pack.ranks, lengths, pack.shared_length, rank, pack.elsewhere)
    return pack.length, *_sizes(mask.exchange)


def _sizes(exchange: tuple[Any, ...]) -> Iterator[int]:
    """The numbers in `ContextMask.exchange`, and the lengths of its arrays."""
    for part in exchange:
        if isinstance(part, tuple):
            yield from _sizes(part)
        else:
            yield len(part) if isinstance(part, np.ndarray) else int(part)


def calls_of_all(ran: Mapping[int, RankCalls], same: Mapping[int, int], grid: Grid) -> dict[int, RankCalls]:
    """Every rank's calls, from those of the first that does the same, as `alike` has it in `same`."""
    return {rank: _moved(ran[first], first, rank, grid) for rank, first in same.items()}


def _moved(calls: RankCalls, start: int, to: int, grid: Grid) -> RankCalls:
    """The calls of rank `start`, as `to` makes them."""
    peers = {call.peer for call in calls.calls if call.peer >= 0}
    moved = {peer: grid.moved([start, peer], start, to)[1] for peer in peers}
    return replace(
        calls,
        groups=[grid.moved(members, start, to) for members in calls.groups],
        calls=[call._replace(peer=moved.get(call.peer, -1)) for call in calls.calls],
    )
