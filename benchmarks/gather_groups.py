"""What gathering keys and values in groups of heads is predicted to gain, for the paper's Table 1.

    python benchmarks/gather_groups.py

Seconds of a step in simulation, on the paper's cluster (h100_roce), of `wlb_lazy` with `hybrid` sharding and
order `best`; documents of lognormal lengths (median 2,000 tokens, sigma 1.6), cut at the context window.
"""

from __future__ import annotations

from dataclasses import replace

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from wlb_titan.cost.cluster import load_cluster
from wlb_titan.cost.models import PAPER_DEGREES, PAPER_MODELS
from wlb_titan.settings import PackingSettings
from wlb_titan.simulator.job import SimulatedJob, cluster_latency
from wlb_titan.simulator.scenario import Policy, Scenario
from wlb_titan.simulator.step import simulate

GROUPS = (1, 2, 4)
POLICY = Policy("wlb_lazy", "hybrid", "best")


@click.command()
@click.option("--steps", default=20, show_default=True, help="Simulated steps of each.")
def main(steps: int) -> None:
    """Prints step times of every row for 1, 2 and 4 groups, as far as a rank has so many key heads."""
    random = np.random.default_rng(0)
    cluster = load_cluster("h100_roce")
    table = Table("configuration", "degrees", *(f"{groups} groups, s" for groups in GROUPS), "gain")
    for name, degrees in PAPER_DEGREES.items():
        size, window = name.split("-")
        model, tokens = PAPER_MODELS[size], int(window.removesuffix("K")) * 1024
        job = SimulatedJob(
            model=model,
            degrees=degrees,
            cluster=cluster,
            latency=cluster_latency(cluster, model, degrees.tensor),
        )
        scenario = Scenario(
            source="lognormal",
            lengths=np.clip(random.lognormal(np.log(2000), 1.6, size=200_000), 16, tokens).astype(np.int64),
            window=tokens,
            micro_batches=degrees.pipeline * degrees.data,
            job=job,
            packing=PackingSettings(),
        )
        plans = scenario.plans(POLICY, steps)
        possible = [groups for groups in GROUPS if model.kv_heads // degrees.tensor % groups == 0]
        seconds = [
            float(simulate(replace(job, gather_groups=groups), plans).seconds.mean()) for groups in possible
        ]
        cells = [f"{second:.3f}" for second in seconds] + [""] * (len(GROUPS) - len(seconds))
        table.add_row(name, str(degrees), *cells, f"{seconds[0] / min(seconds):.3f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
