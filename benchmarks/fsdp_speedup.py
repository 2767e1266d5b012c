"""Tokens per second of two data-parallel processes under FSDP, one core each, under packing policies.

    python benchmarks/fsdp_speedup.py --output benchmarks/results/cpu/fsdp_speedup.json

The two ranks gather and reduce every layer's weights in every micro-batch, so they meet at each of them: a
step takes the sum over k of the longer of the two ranks' k-th micro-batches. Model, documents and turns are
as in pipeline_speedup.py. Warm-up steps of `plain` give the processor time of micro-batches, to which
a d^2 + b d is fitted; by it the policies pack and the steps are predicted.

Two cores of one machine share memory and more: each is slower while the other works. A probe measures by
how much, before the steps; the rest of a micro-batch, for which its neighbour only waits, is predicted to be
that much faster.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from common.trainers import BenchTrainer, in_two_processes, make_config, make_corpus, shared_folder
from fidelity_probe import Probe
from pipeline_speedup import WARM_UP, WINDOW, Result, features, show, take_turns

from wlb_titan.packing import POLICIES
from wlb_titan.plan import Plan, imbalance_degree

RANKS = 2
PROBES = 20
COMPARED = ("plain", "wlb", "wlb_lazy")


def step(trainer: BenchTrainer) -> tuple[float, Plan, np.ndarray]:
    """One step: seconds, plan, and the processor seconds of its micro-batches in the plan's order."""
    seconds = trainer.timed_step()
    gathered: list[list[float]] = [[] for _ in range(RANKS)]
    dist.all_gather_object(gathered, trainer.computed)
    assert trainer.planned.plan is not None
    return seconds, trainer.planned.plan, np.concatenate(gathered)


def fit(records: list[tuple[float, Plan, np.ndarray]]) -> np.ndarray:
    """(a, b) of a sum d^2 + b sum d; relative errors count."""
    design = np.concatenate([features(plan) for _, plan, _ in records])
    seconds = np.concatenate([computed for _, _, computed in records])
    return np.linalg.lstsq(design / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]


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


def predicted_seconds(costs: np.ndarray, slower: float, plan: Plan) -> float:
    """Of a step whose ranks wait for one another at every micro-batch."""
    work = np.sort((features(plan) @ costs).reshape(RANKS, -1), axis=0)
    return float((work[0] + (work[1] - work[0]) / slower).sum())


def measure(folder: Path, steps: int, micro_batches: int) -> tuple[list[Result], np.ndarray, float]:
    make_corpus(folder, (steps + 3 * WARM_UP + 8) * micro_batches, window=WINDOW, sigma=1.5, median=500)

    def trainer(policy: str, cost_model: str = "quadratic:1,1000") -> BenchTrainer:
        config = make_config(
            folder, policy, window=WINDOW, micro_batches=micro_batches, layers=2, replicas=RANKS
        )
        config.wlb.packing = POLICIES.configure(policy, cost_model=cost_model)
        return BenchTrainer(config)

    slower = slowdown()
    warm = trainer("plain")
    costs = fit([step(warm) for _ in range(4)][1:])
    warm.close()
    results = [Result(policy, "as_packed") for policy in COMPARED]
    trainers = [trainer(policy, "quadratic:{},{}".format(*1e9 * costs)) for policy in COMPARED]

    def figures(which: int) -> dict[str, Any]:
        seconds, plan, computed = step(trainers[which])
        return {
            "plan": plan,
            "work": float((features(plan) @ costs).sum()),
            "predicted": predicted_seconds(costs, slower, plan),
            "seconds": seconds,
            "measured_imbalance": imbalance_degree(computed),
            "bubble": 1 - computed.sum() / (RANKS * seconds),
        }

    take_turns(results, steps, figures)
    for one in trainers:
        one.close()
    return results, costs, slower


@click.command()
@click.option("--steps", default=30, show_default=True, help="Counted steps of each policy.")
@click.option("--micro-batches", default=8, show_default=True, help="Of a step, over both ranks.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the results.")
def main(steps: int, micro_batches: int, output: Path | None) -> None:
    with shared_folder() as folder:
        results, costs, slower = measure(folder, steps, micro_batches)
    if dist.get_rank() == 0:
        show(results, "two data-parallel ranks under FSDP, one core each; x: relative to plain")
        if output is not None:
            record = {
                "settings": {"context_window": WINDOW, "micro_batches": micro_batches, "steps": steps},
                "machine": platform.processor() or platform.machine(),
                "torch": torch.__version__,
                "seconds_per_d2_and_d": costs.tolist(),
                "slowdown_of_two_busy_cores": slower,
                "variants": [r.record() for r in results],
            }
            output.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__" and in_two_processes():
    main()
