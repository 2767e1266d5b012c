"""What gathering keys and values in groups of heads is predicted to gain, for the paper's Table 1.

    python benchmarks/gather_groups.py

Seconds of a step in simulation, on the paper's cluster (h100_roce), of `wlb_lazy` with `hybrid` sharding and
order `best`; documents of lognormal lengths (median 2,000 tokens, sigma 1.6), cut at the context window.
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

from wlb_titan.context import STRATEGIES
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.documents import Documents
from wlb_titan.job import Job, Policy
from wlb_titan.packing import POLICIES
from wlb_titan.simulator.choice import Scenario
from wlb_titan.simulator.step import simulate

GROUPS = (1, 2, 4)
POLICY = Policy("wlb_lazy", "hybrid", "best")


@click.command()
@click.option("--steps", default=20, show_default=True, help="Simulated steps of each.")
def main(steps: int) -> None:
    """Prints step times of every row for 1, 2 and 4 groups, as far as a rank has so many key heads."""
    random = np.random.default_rng(0)
    table = Table("configuration", "degrees", *(f"{groups} groups, s" for groups in GROUPS), "gain")
    for name, degrees in PAPER_DEGREES.items():
        size, window = name.split("-")
        model, tokens = PAPER_MODELS[size], int(window.removesuffix("K")) * 1024
        job = Job(
            model=model,
            degrees=degrees,
            window=tokens,
            micro_batches=degrees.pipeline * degrees.data,
            multiple=degrees.tensor,
            packing=POLICIES.configure("plain", cost_model="simulated"),
        )
        lengths = np.clip(random.lognormal(np.log(2000), 1.6, size=200_000), 16, tokens).astype(np.int64)
        plans = Scenario(job, Documents(lengths=lengths, seed=None)).plans(POLICY, steps)
        possible = [groups for groups in GROUPS if model.kv_heads // degrees.tensor % groups == 0]
        seconds = []
        for groups in possible:
            sharding = STRATEGIES.configure(POLICY.sharding, gather_groups=groups)
            seconds.append(float(simulate(replace(job, sharding=sharding), plans).seconds.mean()))
        cells = [f"{second:.3f}" for second in seconds] + [""] * (len(GROUPS) - len(seconds))
        table.add_row(name, str(degrees), *cells, f"{seconds[0] / min(seconds):.3f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
