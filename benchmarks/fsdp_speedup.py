"""Tokens per second of two data-parallel processes under FSDP, one core each, under packing policies.

    python benchmarks/fsdp_speedup.py --output benchmarks/results/cpu/fsdp_speedup.json

The two ranks gather and reduce every layer's weights in every micro-batch, so they meet at each of them.
What is between two meetings is of three kinds, in which attention and tokens have different shares: a layer's
forward pass, head and loss, a layer's backward pass. So a step takes, summed over k and over these three, the
longer of what the two ranks' k-th micro-batches take in it; and a fixed time for communication and optimizer.
Model, documents and turns are as in pipeline_speedup.py. Warm-up steps of `plain` give the processor time of
the three, to each of which a d^2 + b d is fitted, and the fixed time: what their steps took longer. By these
the policies pack and the steps are predicted.

Two cores of one machine share memory and more: each is slower while the other works. A probe measures by
how much, before the steps; the rest of a micro-batch, for which its neighbour only waits, is predicted to be
that much faster. And what a core takes for the same work differs from time to time, so that even of two equal
micro-batches one is the longer: the warm-up's residuals say by how much, and predicted is the mean of the
longer of two normal times (Clark 1961, the greatest of a finite set of random variables).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from common.trainers import BenchTrainer, in_two_processes, make_config, make_corpus, shared_folder
from fidelity_probe import Probe
from pipeline_speedup import WARM_UP, WINDOW, Result, features, save, show, take_turns

from wlb_titan.packing import POLICIES
from wlb_titan.plan import Plan, imbalance_degree

RANKS = 2
PROBES = 20
COMPARED = ("plain", "wlb", "wlb_lazy")
WARM_UP_FIT = 6  # steps of `plain` that give the costs

Step = tuple[float, Plan, np.ndarray]
"""Seconds, plan, and processor seconds (micro-batches in the plan's order, 3) as `BenchTrainer.computed`."""


def step(trainer: BenchTrainer) -> Step:
    seconds = trainer.timed_step()
    gathered: list[list[np.ndarray]] = [[] for _ in range(RANKS)]
    dist.all_gather_object(gathered, trainer.computed)
    assert trainer.planned.plan is not None
    return seconds, trainer.planned.plan, np.concatenate(gathered)


@dataclass
class Costs:
    """What the warm-up says of steps.

    Attributes:
        coefficients: (3, 2), a and b of a sum d^2 + b sum d, the seconds of each of the three kinds.
        scatter: (3,), standard deviation of what is measured over what is fitted.
        slower: how many times longer a core takes while the other works too.
        fixed: seconds of a step besides its micro-batches.
    """

    coefficients: np.ndarray
    scatter: np.ndarray
    slower: float
    fixed: float = 0.0

    @classmethod
    def fit(cls, steps: list[Step], slower: float) -> Costs:
        """Relative errors count. Head and loss have no attention."""
        design = np.concatenate([features(plan) for _, plan, _ in steps])
        seconds = np.concatenate([computed for _, _, computed in steps])
        coefficients = np.zeros((3, 2))
        for kind, first in enumerate((0, 1, 0)):
            relative = design[:, first:] / seconds[:, kind, None]
            coefficients[kind, first:] = np.linalg.lstsq(relative, np.ones(len(design)), rcond=None)[0]
        scatter = np.std(seconds / (design @ coefficients.T), axis=0)
        costs = cls(coefficients, scatter, slower)
        costs.fixed = float(np.mean([taken - costs.step(plan) for taken, plan, _ in steps]))
        return costs

    def seconds(self, plan: Plan) -> np.ndarray:
        """(micro-batches, 3) in the plan's order."""
        return features(plan) @ self.coefficients.T

    def step(self, plan: Plan) -> float:
        """Seconds of a step, whose ranks wait for one another after each of the three."""
        one, other = self.seconds(plan).reshape(RANKS, -1, 3)
        spread = self.scatter * np.hypot(one, other)
        apart = np.abs(one - other) / spread
        # The longer of the two takes this much longer than the shorter one's mean.
        below = torch.special.ndtr(torch.from_numpy(apart)).numpy()
        density = np.exp(-(apart**2) / 2) / np.sqrt(2 * np.pi)
        rest = spread * (apart * below + density)
        return self.fixed + float((np.minimum(one, other) + rest / self.slower).sum())

    def quadratic(self) -> str:
        """As a cost model of the planner, in nanoseconds."""
        return "quadratic:{},{}".format(*1e9 * self.coefficients.sum(axis=0))


def slowdown() -> float:
    """How many times longer a core takes for the same work while the other works too; median of rounds."""
    probe, rank = Probe(), dist.get_rank()
    ratios = []
    for _ in range(PROBES):
        alone = torch.zeros(RANKS)
        for turn in range(RANKS):
            dist.barrier()
            if turn == rank:
                alone[rank] = probe.seconds()
        dist.barrier()
        together = torch.zeros(RANKS)
        together[rank] = probe.seconds()
        dist.all_reduce(alone)
        dist.all_reduce(together)
        ratios.append(float(together.sum() / alone.sum()))
    return float(np.median(ratios))


def measure(folder: Path, steps: int, micro_batches: int) -> tuple[list[Result], Costs]:
    make_corpus(folder, (steps + 3 * WARM_UP + 8) * micro_batches, window=WINDOW, sigma=1.5, median=500)

    def trainer(policy: str, cost_model: str = "quadratic:1,1000") -> BenchTrainer:
        config = make_config(
            folder, policy, window=WINDOW, micro_batches=micro_batches, layers=2, replicas=RANKS
        )
        config.wlb.packing = POLICIES.configure(policy, cost_model=cost_model)
        return BenchTrainer(config)

    slower = slowdown()
    warm = trainer("plain")
    costs = Costs.fit([step(warm) for _ in range(1 + WARM_UP_FIT)][1:], slower)
    warm.close()
    results = [Result(policy, "as_packed") for policy in COMPARED]
    trainers = [trainer(policy, costs.quadratic()) for policy in COMPARED]

    def figures(which: int) -> dict[str, Any]:
        seconds, plan, computed = step(trainers[which])
        return {
            "plan": plan,
            "work": float(costs.seconds(plan).sum()),
            "predicted": costs.step(plan),
            "seconds": seconds,
            "measured_imbalance": imbalance_degree(computed.sum(axis=1)),
            "bubble": 1 - computed.sum() / (RANKS * seconds),
        }

    take_turns(results, steps, figures)
    for one in trainers:
        one.close()
    return results, costs


@click.command()
@click.option("--steps", default=30, show_default=True, help="Counted steps of each policy.")
@click.option("--micro-batches", default=8, show_default=True, help="Of a step, over both ranks.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the results.")
def main(steps: int, micro_batches: int, output: Path | None) -> None:
    with shared_folder() as folder:
        results, costs = measure(folder, steps, micro_batches)
    if dist.get_rank() == 0:
        show(results, "two data-parallel ranks under FSDP, one core each; x: relative to plain")
        save(
            output,
            results,
            costs.coefficients,
            micro_batches,
            steps,
            scatter=costs.scatter.tolist(),
            slowdown_of_two_busy_cores=costs.slower,
            fixed_seconds_of_a_step=costs.fixed,
        )
    dist.destroy_process_group()


if __name__ == "__main__" and in_two_processes():
    main()
