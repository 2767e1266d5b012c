"""Tokens per second of two pipeline stages, one core each, under packing policies and orders, interleaved.

    python benchmarks/pipeline_speedup.py --output benchmarks/results/cpu/pipeline_speedup.json

trains one small Llama (2 layers, width 128, 4 heads; float32; vocabulary 512) with a context window of 8192
tokens, 4 micro-batches a step, 1F1B on 2 stages. All variants train on the
same documents, none of which is cut, and take turns step by step in the same two processes. Before that,
warm-up steps of `plain` give the times of passes, to which a d^2 + b d is fitted for each stage and
direction: by it the policies pack, and the dependency graph predicts every step.

Tokens per second alone would flatter a policy that still has long documents waiting at the end: "work" are
the predicted seconds of the documents trained, over the seconds that the two cores took.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from common.trainers import (
    STAGES,
    BenchTrainer,
    in_two_processes,
    make_config,
    make_corpus,
    shared_folder,
)
from rich.console import Console
from rich.table import Table

from wlb_titan.packing import POLICIES
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.pipeline.order import ORDERS
from wlb_titan.pipeline.schedule import PipelineShape
from wlb_titan.plan import LENGTH, Plan
from wlb_titan.runtime.pipeline.pass_timer import Pass
from wlb_titan.runtime.step_trace import RankPasses, bubble, measured_imbalance

VARIANTS = [
    ("plain", "as_packed"),
    ("plain", "best"),
    ("wlb", "as_packed"),
    ("wlb_lazy", "as_packed"),
    ("wlb_lazy", "best"),
]
WINDOW = 8192
WARM_UP = 2  # steps of every variant that are not counted: caches, and the queues of `wlb` fill
SHAPE = PipelineShape("1F1B", STAGES)


@dataclass
class Result:
    """Sums over the counted steps of one variant; lists have an entry a step."""

    policy: str
    order: str
    tokens: int = 0
    work: float = 0.0
    predicted: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    measured_imbalance: list[float] = field(default_factory=list)
    bubble: list[float] = field(default_factory=list)

    def add(
        self,
        plan: Plan,
        *,
        work: float,
        predicted: float,
        seconds: float,
        measured_imbalance: float,
        bubble: float,
    ) -> None:
        """Takes a step in."""
        self.tokens += plan.tokens
        self.work += work
        self.predicted.append(predicted)
        self.seconds.append(seconds)
        self.imbalance.append(plan.imbalance)
        self.measured_imbalance.append(measured_imbalance)
        self.bubble.append(bubble)

    def record(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self) | {
            "tokens_per_second": self.tokens_per_second,
            "work_per_second": self.work_per_second,
        }

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / sum(self.seconds)

    @property
    def work_per_second(self) -> float:
        return self.work / STAGES / sum(self.seconds)


class Costs:
    """Seconds of a pass of a stage, a sum d^2 + b sum d over a micro-batch's documents, fitted."""

    def __init__(self, steps: list[tuple[Plan, list[RankPasses]]]) -> None:
        self.coefficients = np.zeros((STAGES, 2, 2))  # stage, direction, (a, b)
        for stage in range(STAGES):
            for direction, kinds in enumerate(("FL", "B")):
                rows, seconds = [], []
                for plan, ranks in steps:
                    times = np.zeros(len(plan.micro_batches))
                    for one in ranks[stage].passes:
                        if one.kind in kinds:
                            times[one.micro_batch] += one.seconds
                    rows.append(features(plan))
                    seconds.append(times)
                design, target = np.concatenate(rows), np.concatenate(seconds)
                # Relative errors count: otherwise the longest micro-batches would decide alone.
                fit = np.linalg.lstsq(design / target[:, None], np.ones(len(target)), rcond=None)[0]
                self.coefficients[stage, direction] = np.maximum(fit, 0.0)

    def seconds(self, plan: Plan) -> np.ndarray:
        """float64 (stages, directions, micro-batches)."""
        return self.coefficients @ features(plan).T

    def quadratic(self) -> str:
        """As a cost model of the planner: both passes through both stages, in nanoseconds."""
        a, b = 1e9 * self.coefficients.sum(axis=(0, 1))
        return f"quadratic:{a},{b}"


def features(plan: Plan) -> np.ndarray:
    lengths = [m.documents[:, LENGTH].astype(float) for m in plan.micro_batches]
    return np.array([[(d * d).sum(), d.sum()] for d in lengths])


def predicted_seconds(costs: Costs, plan: Plan) -> float:
    seconds = costs.seconds(plan)[..., None]
    times = PassTimes(forward=seconds[:, 0], inputs=seconds[:, 1] / 2, weights=seconds[:, 1] / 2)
    return float(PipelineGraph(SHAPE, len(plan.micro_batches)).ends(times).max())


def step(trainer: BenchTrainer) -> tuple[float, Plan, list[RankPasses]]:
    """One step: seconds, plan, and the passes of both stages."""
    seconds = trainer.timed_step(passes=True)
    gathered: list[list[Pass]] = [[] for _ in range(STAGES)]
    dist.all_gather_object(gathered, trainer.passes)
    assert trainer.planned.plan is not None
    return seconds, trainer.planned.plan, [RankPasses(0, s, 0, 0, gathered[s]) for s in range(STAGES)]


def measure(folder: Path, steps: int, micro_batches: int) -> tuple[list[Result], Costs]:
    # Queues and order need more documents than are counted.
    make_corpus(folder, (steps + 3 * WARM_UP + 8) * micro_batches, window=WINDOW, sigma=1.5, median=500)

    def trainer(policy: str, order: str, cost_model: str = "quadratic:1,1000") -> BenchTrainer:
        config = make_config(
            folder, f"{policy}-{order}", window=WINDOW, micro_batches=micro_batches, layers=STAGES
        )
        config.wlb.packing = POLICIES.configure(policy, cost_model=cost_model)
        config.wlb.pipeline = ORDERS.configure(order)
        return BenchTrainer(config)

    warm = trainer("plain", "as_packed")
    records = [step(warm) for _ in range(4)][1:]
    costs = Costs([(plan, passes) for _, plan, passes in records])
    warm.close()
    results = [Result(*variant) for variant in VARIANTS]
    trainers = [trainer(*variant, costs.quadratic()) for variant in VARIANTS]

    def figures(which: int) -> dict[str, Any]:
        seconds, plan, ranks = step(trainers[which])
        return {
            "plan": plan,
            "work": float(costs.seconds(plan).sum()),
            "predicted": predicted_seconds(costs, plan),
            "seconds": seconds,
            "measured_imbalance": measured_imbalance(ranks),
            "bubble": bubble(ranks),
        }

    take_turns(results, steps, figures)
    for one in trainers:
        one.close()
    return results, costs


def take_turns(results: list[Result], steps: int, figures: Callable[[int], dict[str, Any]]) -> None:
    """Runs a step of each variant in turn; after the warm-up its figures are taken in.

    Args:
        results: of the variants.
        steps: counted ones of each variant.
        figures: runs one step of the variant of this number and returns what `Result.add` takes.
    """
    for number in range(-WARM_UP, steps):
        for turn in range(len(results)):
            which = (turn + number) % len(results)  # so that none always follows the same other
            of_step = figures(which)
            if number >= 0:
                results[which].add(**of_step)
        if dist.get_rank() == 0:
            print(
                f"{number + 1} of {steps}",
                *(f"{r.seconds[-1]:.2f}" for r in results if r.seconds),
                flush=True,
            )


def show(results: list[Result], title: str) -> None:
    table = Table(
        *(
            "policy",
            "order",
            "imbalance",
            "measured",
            "bubble",
            "tokens/s",
            "x",
            "work/s",
            "x",
            "predicted x",
        ),
        title=title,
    )
    base = results[0]
    for one in results:
        predicted = (one.work / sum(one.predicted)) / (base.work / sum(base.predicted))
        cells = [
            *(f"{statistics.mean(v):.3f}" for v in (one.imbalance, one.measured_imbalance, one.bubble)),
            *(f"{one.tokens_per_second:,.0f}", f"{one.tokens_per_second / base.tokens_per_second:.3f}"),
            *(f"{one.work_per_second:.3f}", f"{one.work_per_second / base.work_per_second:.3f}"),
            f"{predicted:.3f}",
        ]
        table.add_row(one.policy, one.order, *cells)
    Console(width=110).print(table)


def save(
    output: Path | None,
    results: Sequence[Result],
    coefficients: np.ndarray,
    micro_batches: int,
    steps: int,
    **costs: Any,
) -> None:
    """Writes the results as JSON, with what else is known of the costs; nothing without a file."""
    if output is None:
        return
    record = {
        "settings": {"context_window": WINDOW, "micro_batches": micro_batches, "steps": steps},
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "seconds_per_d2_and_d": coefficients.tolist(),
        **costs,
        "variants": [r.record() for r in results],
    }
    output.write_text(json.dumps(record, indent=1) + "\n")


@click.command()
@click.option("--steps", default=30, show_default=True, help="Counted steps of each variant.")
@click.option("--micro-batches", default=4, show_default=True, help="Of a step.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the results.")
def main(steps: int, micro_batches: int, output: Path | None) -> None:
    with shared_folder() as folder:
        results, costs = measure(folder, steps, micro_batches)
    if dist.get_rank() == 0:
        show(results, "two stages, one core each; x: relative to plain as packed")
        save(output, results, costs.coefficients, micro_batches, steps)
    dist.destroy_process_group()


if __name__ == "__main__" and in_two_processes():
    main()
