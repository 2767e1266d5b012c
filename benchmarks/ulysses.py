"""When Ulysses is predicted to be faster than gathering keys: Table 1, and a model of few key heads.

    python benchmarks/ulysses.py

Seconds of a step and GiB of the fullest GPU in simulation, on the paper's cluster (h100_roce: 8 GPUs a node,
RoCE between), of `wlb_lazy` packing under each sharding; documents of lognormal lengths (median 2,000 tokens,
sigma 1.6), cut at the context window.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent / "reproduce"))

from table1 import PAPER_DEGREES

from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.job import Job, Policy
from wlb_titan.memory.rank import GIB
from wlb_titan.simulator.choice import Scenario

SHARDINGS = ("hybrid", "ulysses")
LLAMA3_8B = replace(PAPER_MODELS["7B"], kv_heads=8, feed_forward=14336, vocabulary=128256)
CASES = {
    **{
        name: (PAPER_MODELS[name.split("-")[0]], degrees, int(name.split("-")[1].removesuffix("K")) * 1024)
        for name, degrees in PAPER_DEGREES.items()
    },
    "7B, CP 8": (PAPER_MODELS["7B"], Degrees(context=8, shard=4), 131072),
    "7B, CP 16": (PAPER_MODELS["7B"], Degrees(context=16, shard=2), 131072),
    "Llama 3 8B, CP 8": (LLAMA3_8B, Degrees(context=8, shard=4), 131072),
    "Llama 3 8B, CP 16": (LLAMA3_8B, Degrees(context=16, shard=2), 131072),
    "Llama 3 8B, TP 4 x CP 4": (LLAMA3_8B, Degrees(tensor=4, context=4, shard=2), 131072),
}


@click.command()
@click.option("--steps", default=10, show_default=True, help="Simulated steps of each.")
def main(steps: int) -> None:
    """Prints a row for each model and its degrees; a dash where the heads do not suffice."""
    random = np.random.default_rng(0)
    headings = [f"{sharding}, {unit}" for sharding in SHARDINGS for unit in ("s", "GiB")]
    table = Table("model", "degrees", *headings, "fastest")
    for name, (model, degrees, window) in CASES.items():
        job = Job(
            model=model,
            degrees=degrees,
            window=window,
            micro_batches=max(degrees.pipeline * degrees.data, 4),
            multiple=degrees.tensor,
        )
        lengths = np.clip(random.lognormal(np.log(2000), 1.6, size=100_000), 16, window).astype(np.int64)
        scenario = Scenario(job, Documents(lengths=lengths, seed=None))
        seconds, cells = {}, []
        for sharding in SHARDINGS:
            try:
                prediction = scenario.predict(Policy("wlb_lazy", sharding), steps)
            except PlanError:
                cells += ["-", "-"]
                continue
            seconds[sharding] = float(prediction.seconds.mean())
            cells += [f"{seconds[sharding]:.3f}", f"{prediction.peak_memory.total / GIB:.1f}"]
        table.add_row(name, str(degrees), *cells, min(seconds, key=lambda one: seconds[one]))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
