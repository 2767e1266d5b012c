"""Tokens per second of two data-parallel processes under FSDP, one core each, under packing policies.

    python benchmarks/fsdp_speedup.py --output benchmarks/results/cpu/fsdp_speedup.json

The two ranks gather and reduce every layer's weights in every micro-batch, so they meet at each of them: a
step takes the sum over k of the longer of the two ranks' k-th micro-batches. Model, documents and turns are
as in pipeline_speedup.py. Warm-up steps of `plain` give the processor time of micro-batches, to which
a d^2 + b d is fitted; by it the policies pack and the steps are predicted.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

import click
import numpy as np
import torch
import torch.distributed as dist
from pipeline_lab import BenchTrainer, in_two_processes, make_config, make_corpus, shared_folder
from pipeline_speedup import WARM_UP, WINDOW, Result, features, show

from wlb_titan.planner.plan import Plan, imbalance_degree

RANKS = 2
POLICIES = ("plain", "wlb", "wlb_lazy")


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


def predicted_seconds(costs: np.ndarray, plan: Plan) -> float:
    """Of a step whose ranks wait for one another at every micro-batch."""
    return float((features(plan) @ costs).reshape(RANKS, -1).max(axis=0).sum())


def measure(folder: Path, steps: int, micro_batches: int) -> tuple[list[Result], np.ndarray]:
    make_corpus(folder, (steps + 3 * WARM_UP + 8) * micro_batches, window=WINDOW, sigma=1.5, median=500)

    def trainer(policy: str, cost_model: str = "quadratic:1,1000") -> BenchTrainer:
        config = make_config(
            folder, policy, window=WINDOW, micro_batches=micro_batches, layers=2, replicas=RANKS
        )
        config.wlb.packing.policy = policy
        config.wlb.packing.cost_model = cost_model
        return BenchTrainer(config)

    warm = trainer("plain")
    costs = fit([step(warm) for _ in range(4)][1:])
    warm.close()
    results = [Result(policy, "as_packed") for policy in POLICIES]
    trainers = [trainer(policy, "quadratic:{},{}".format(*1e9 * costs)) for policy in POLICIES]
    for number in range(-WARM_UP, steps):
        for turn in range(len(POLICIES)):
            which = (turn + number) % len(POLICIES)  # so that none always follows the same other
            seconds, plan, computed = step(trainers[which])
            if number >= 0:
                results[which].add(
                    plan,
                    work=float((features(plan) @ costs).sum()),
                    predicted=predicted_seconds(costs, plan),
                    seconds=seconds,
                    measured_imbalance=imbalance_degree(computed),
                    bubble=1 - computed.sum() / (RANKS * seconds),
                )
        if dist.get_rank() == 0:
            print(
                f"{number + 1} of {steps}",
                *(f"{r.seconds[-1]:.2f}" for r in results if r.seconds),
                flush=True,
            )
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
        if output is not None:
            record = {
                "settings": {"context_window": WINDOW, "micro_batches": micro_batches, "steps": steps},
                "machine": platform.processor() or platform.machine(),
                "torch": torch.__version__,
                "seconds_per_d2_and_d": costs.tolist(),
                "variants": [r.record() for r in results],
            }
            output.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__" and in_two_processes():
    main()
