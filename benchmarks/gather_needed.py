"""What it gains that context-parallel ranks exchange only the keys that somebody needs, in simulation.

    python benchmarks/gather_needed.py --output benchmarks/results/cpu/gather_needed.json

Seconds of a step of 8 windows (16 with CP 2) on 32 GPUs of the paper's cluster (h100_roce), `wlb_lazy`
packing, documents of web pages or code. With TP 1 context parallelism of up to 8 ranks stays within a node
(NVLink), that of 16 and 32 ranks crosses nodes; with TP 8 all of it does.

- everything: `hybrid` as it was, which gathers all keys and does not weigh them
- all ranks: keys of documents that lie on several ranks, among all ranks
- hybrid: among 2, 8, ... neighbours or all, as few as will do
- halves: the same, and a micro-batch may fall into two, each of half of its ranks, where that is faster: as
  if data-parallel ranks of half the degree shared those that have long documents. Each rank has as many
  tokens, and up to 5 % more
- ulysses, ulysses_gather: for comparison; a dash where the heads do not suffice

GB are what a rank receives in a layer for a micro-batch, forward; GiB the fullest GPU's peak, `!` where it is
over its memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from wlb_titan.context import ALL_KEYS
from wlb_titan.context.all_gather import Hybrid
from wlb_titan.cost.analytic import BYTES
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.cost.passes import pass_times
from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import NAMED
from wlb_titan.errors import PlanError
from wlb_titan.job import Job
from wlb_titan.memory.peak import GIB
from wlb_titan.plan import LENGTH, MicroBatch, Plan
from wlb_titan.policies import Policy
from wlb_titan.simulator.planned import passing, travelling
from wlb_titan.simulator.scenario import Scenario

GPUS = 32
WINDOWS = 8
ROOM = 1.05  # of half a micro-batch's tokens a half may have
MODELS = {
    "7B": PAPER_MODELS["7B"],
    "8B": replace(PAPER_MODELS["7B"], kv_heads=8, feed_forward=14336, vocabulary=128256),
}


class AllRanks(Hybrid):
    """Documents lie on one rank or on all."""

    @staticmethod
    def group_sizes(ranks):
        return (ranks,)


class Everything(AllRanks):
    """All keys travel, whoever needs them, and are not weighed against attention."""

    spares = False

    def __init__(self, config, ranks, latency, moves=()):
        super().__init__(config, ranks, latency)

    def seconds(self, sharding):
        return self.latency.seconds(sharding)

    def travelling(self, sharding, total, slices=None):
        return (total,)

    def keys(self, sharding, total, slices=None):
        return ALL_KEYS


SHARDINGS = {
    "everything": "gather_needed:Everything",
    "all ranks": "gather_needed:AllRanks",
    "hybrid": "hybrid",
    "ulysses": "ulysses",
    "ulysses_gather": "ulysses_gather",
}


def cases() -> Iterator[tuple[str, int, str, Degrees]]:
    """Model, window, lengths and degrees."""
    degrees = [(1, cp) for cp in (2, 4, 8, 16, 32)] + [(8, cp) for cp in (2, 4)]
    for model, window, lengths in product(MODELS, (65536, 131072, 262144, 524288), ("web", "code")):
        for tensor, context in degrees:
            yield (
                model,
                window,
                lengths,
                Degrees(tensor=tensor, context=context, shard=GPUS // tensor // context),
            )


def predict(
    model: str, window: int, lengths: str, degrees: Degrees, sharding: str, steps: int
) -> dict | None:
    """Figures of some steps; None where the strategy cannot run."""
    job = Job(
        model=MODELS[model],
        degrees=degrees,
        window=window,
        micro_batches=max(WINDOWS, degrees.data),
        multiple=degrees.tensor,
    )
    documents = Documents(lengths=NAMED[lengths].draw(seed=0), seed=None)
    policy = Policy("wlb_lazy", SHARDINGS[sharding])
    scenario = Scenario(job, documents)
    try:
        plans = scenario.plans(policy, steps, warm_up=1)
        found = scenario.simulate(policy, plans)
    except PlanError:
        return None
    job = scenario.under(policy)
    halved = halves_save(job, plans) if sharding == "hybrid" else 0.0
    packs = [m for plan in plans for m in plan.micro_batches]
    received = np.array([move.received for move in job.exchanging.moves]) * BYTES
    return {
        "seconds": float(found.seconds.mean()),
        "halves_save": halved,
        "received_gb": float(np.mean([received @ travelling(m, job) for m in packs])) / 1e9,
        "peak_gib": found.peak_memory.total / GIB,
        "fits": found.peak_memory.total <= job.cluster.memory,
    }


def halves_save(job: Job, plans: list[Plan]) -> float:
    """Seconds of a step that it saves if micro-batches may fall into halves."""
    context = job.degrees.context // 2
    degrees = replace(job.degrees, context=context, shard=2 * job.degrees.shard)
    half = replace(job, degrees=degrees, micro_batches=2 * job.micro_batches)
    before, after = [], []
    for plan in plans:
        whole = np.array([pass_seconds(job, m) for m in plan.micro_batches])
        split = np.array([halved_seconds(half, m) for m in plan.micro_batches])
        # FSDP has data-parallel ranks wait for each other in every pass.
        for found, seconds in ((before, whole), (after, np.minimum(whole, split))):
            found.append(seconds.reshape(job.degrees.data, -1).max(axis=0).sum())
    return float(np.mean(before) - np.mean(after))


def halved_seconds(half: Job, micro_batch: MicroBatch) -> float:
    """Of a micro-batch in two halves, the slower one; infinite where one has not room for its documents."""
    lengths = micro_batch.documents[:, LENGTH]
    works = half.cost_model.forward(lengths) + half.cost_model.backward(lengths)
    loads, rooms, members = np.zeros(2), np.full(2, ROOM * micro_batch.length / 2), ([], [])
    for row in np.argsort(-works, kind="stable"):
        fits = np.flatnonzero(rooms >= lengths[row])
        if not len(fits):
            return np.inf
        side = fits[loads[fits].argmin()]
        loads[side] += works[row]
        rooms[side] -= lengths[row]
        members[side].append(row)
    return max(pass_seconds(half, part_of(micro_batch, sorted(rows), half)) for rows in members)


def part_of(micro_batch: MicroBatch, rows: list[int], job: Job) -> MicroBatch:
    """A micro-batch with some of its documents, divided over the job's context-parallel ranks."""
    documents = micro_batch.documents[rows]
    length = -(-int(documents[:, LENGTH].sum()) // job.divisor) * job.divisor
    ranks = None
    if job.strategy is not None:
        _, ranks = job.strategy.shard(documents[:, LENGTH], length)
    return replace(micro_batch, documents=documents, length=length, padding=0, ranks=ranks)


def pass_seconds(job: Job, micro_batch: MicroBatch) -> float:
    """Seconds of all passes of a micro-batch."""
    times = pass_times(job, passing([micro_batch], job).in_runs(1))
    return float(sum(each.sum() for each in (times.forward, times.inputs, times.weights)))


@click.command()
@click.option("--steps", default=2, show_default=True, help="Simulated steps of each.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the figures.")
def main(steps: int, output: Path | None) -> None:
    """Prints a row for each case: step, GB received and peak under each sharding."""
    console = Console(width=170)
    columns = (f"{name}: s, GB, GiB" for name in SHARDINGS)
    table = Table("case", *columns, "gain", "of it by groups", "by halves")
    records = []
    for model, window, lengths, degrees in track(list(cases()), console=console):
        found = {s: predict(model, window, lengths, degrees, s, steps) for s in SHARDINGS}
        case = f"{model} {window >> 10}K {lengths}, TP {degrees.tensor} CP {degrees.context}"
        cells = [
            "-"
            if f is None
            else f"{f['seconds']:.3f} {f['received_gb']:.2f} {f['peak_gib']:.0f}" + ("" if f["fits"] else "!")
            for f in found.values()
        ]
        seconds = {s: f["seconds"] for s, f in found.items() if f is not None}
        hybrid = seconds["hybrid"]
        halves = hybrid - found["hybrid"]["halves_save"]
        gain = seconds["everything"] / hybrid, seconds["all ranks"] / hybrid, hybrid / halves
        print(case, *cells, *gain, flush=True)
        table.add_row(case, *cells, *(f"{one:.3f}" for one in gain))
        records.append({"case": case, **found})
    console.print(table)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
