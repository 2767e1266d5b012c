"""Two pipeline stages, one core each: slices against whole documents, step by step in turn.

    python benchmarks/slim_speedup.py --output benchmarks/results/cpu/slim_speedup.json

trains one small Llama (4 layers, width 128, 4 heads; float32; vocabulary 512; no checkpointing) with a
context window of 8192 tokens, 4 windows a step, on the same documents, none of which a window's end cuts.
Times of passes are measured in warm-up steps of `plain`, a d^2 + b d is fitted to them for each stage and
direction, and by it the policies pack and every step is predicted on its dependency graph. "activations" are
MiB that the first stage's process has allocated at most at the end of a forward pass, beyond what it had
before the step.

The pieces are those of `pipeline_speedup.py`; "work" is explained there.
"""

from __future__ import annotations

import ctypes
import statistics
from dataclasses import dataclass, field
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
from pipeline_speedup import WINDOW, Costs, Result, save, step, take_turns
from rich.console import Console
from rich.table import Table

from wlb_titan.packing import POLICIES
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.pipeline.order import ORDERS
from wlb_titan.pipeline.schedule import PipelineShape
from wlb_titan.plan import LENGTH, PREFIX, Plan
from wlb_titan.runtime.step_trace import bubble, measured_imbalance

LAYERS = 4


@dataclass(frozen=True)
class Variant:
    """A packing policy, an order, and stages of a rank; of `slim` the MicroPacks, and whether the fewest
    tokens are in flight."""

    policy: str
    order: str = "as_packed"
    chunks: int = 1
    micropacks: int = 0
    least: bool = False

    @property
    def schedule(self) -> str:
        return "1F1B" if self.chunks == 1 else "Interleaved1F1B"

    def __str__(self) -> str:
        parts = [self.policy, f"M={self.micropacks}" if self.micropacks else self.order]
        parts += ["interleaved"] * (self.chunks > 1) + ["least in flight"] * self.least
        return " ".join(parts)

    @property
    def settings(self) -> dict[str, Any]:
        """Of the packing policy."""
        if not self.micropacks:
            return {}
        in_flight = {"tokens_in_flight": "least"} if self.least else {}
        return {"micropacks": self.micropacks, "slack": 0, **in_flight}


VARIANTS = (
    Variant("plain"),
    Variant("plain", chunks=2),
    Variant("wlb_lazy", "best"),
    Variant("slim", micropacks=8),
    Variant("slim", micropacks=16),
    Variant("slim", micropacks=16, least=True),
    Variant("slim", micropacks=32, least=True),
    Variant("slim", chunks=2, micropacks=8),
)


@dataclass
class SlimResult(Result):
    """Besides, MiB of activations, an entry a step."""

    activations: list[float] = field(default_factory=list)


def predicted_seconds(costs: Costs, plan: Plan, variant: Variant) -> float:
    """Of a step, by fitted times of the two halves of the model, which interleaving divides once more."""
    rows = []
    for m in plan.micro_batches:
        length = m.documents[:, LENGTH].astype(float)
        prefix = np.zeros_like(length) if m.slices is None else m.slices[:, PREFIX].astype(float)
        rows.append([((prefix + length) ** 2 - prefix**2).sum(), length.sum()])
    halves = costs.coefficients @ np.array(rows).T  # stages, directions, micro-batches
    seconds = np.concatenate([halves.mean(axis=0, keepdims=True) / variant.chunks] * STAGES * variant.chunks)
    if variant.chunks == 1:
        seconds = halves
    seconds = seconds[..., None]
    times = PassTimes(forward=seconds[:, 0], inputs=seconds[:, 1] / 2, weights=seconds[:, 1] / 2)
    flow = None if plan.flows is None else plan.flows[0]
    shape = PipelineShape(variant.schedule, STAGES, variant.chunks)
    return float(PipelineGraph(shape, len(plan.micro_batches), flow).ends(times).max())


def work(costs: Costs, plan: Plan) -> float:
    """Predicted seconds of the documents of a step, both passes through both stages."""
    lengths = plan.document_lengths.astype(float)
    return float((costs.coefficients @ np.array([(lengths**2).sum(), lengths.sum()])).sum())


class Allocated:
    """MiB that malloc has given out, at most at the end of a forward pass, beyond the step's begin."""

    def __init__(self, trainer: BenchTrainer) -> None:
        self._library = ctypes.CDLL("libc.so.6")
        fields = [(f"field{i}", ctypes.c_size_t) for i in range(10)]
        self._library.mallinfo2.restype = type("mallinfo2", (ctypes.Structure,), {"_fields_": fields})
        self._begin = self._most = 0.0
        for part in trainer.model_parts:
            part.register_forward_hook(lambda *_: self._look())

    def begin(self) -> None:
        self._begin = self._most = self._now()

    def most(self) -> float:
        """Of the first stage's process, on both."""
        most = torch.tensor(self._most - self._begin)
        dist.broadcast(most, src=0)
        return float(most)

    def _look(self) -> None:
        self._most = max(self._most, self._now())

    def _now(self) -> float:
        information = self._library.mallinfo2()
        return (information.field7 + information.field4) / 2**20


def measure(folder: Path, steps: int, micro_batches: int) -> tuple[list[SlimResult], Costs]:
    make_corpus(folder, (steps + 14) * micro_batches, window=WINDOW, sigma=1.5, median=500)

    def trainer(variant: Variant, cost_model: str) -> BenchTrainer:
        config = make_config(folder, str(variant), window=WINDOW, micro_batches=micro_batches, layers=LAYERS)
        config.parallelism.pipeline_parallel_schedule = variant.schedule
        config.wlb.packing = POLICIES.configure(variant.policy, cost_model=cost_model, **variant.settings)
        config.wlb.pipeline = ORDERS.configure(variant.order)
        return BenchTrainer(config)

    warm = trainer(VARIANTS[0], "quadratic:1,1000")
    records = [step(warm) for _ in range(4)][1:]
    costs = Costs([(plan, passes) for _, plan, passes in records])
    warm.close()
    results = [SlimResult(str(variant), variant.order) for variant in VARIANTS]
    trainers = [trainer(variant, costs.quadratic()) for variant in VARIANTS]
    allocated = [Allocated(one) for one in trainers]

    def figures(which: int) -> dict[str, Any]:
        allocated[which].begin()
        seconds, plan, ranks = step(trainers[which])
        results[which].activations.append(allocated[which].most())
        return {
            "plan": plan,
            "work": work(costs, plan),
            "predicted": predicted_seconds(costs, plan, VARIANTS[which]),
            "seconds": seconds,
            "measured_imbalance": measured_imbalance(ranks),
            "bubble": bubble(ranks),
        }

    take_turns(list(results), steps, figures)
    for one in trainers:
        one.close()
    return results, costs


def show(results: list[SlimResult], title: str) -> None:
    heads = ("", "bubble", "tokens/s", "x", "work/s", "x", "predicted x", "activations MiB")
    table = Table(*heads, title=title)
    base = results[0]
    for one in results:
        predicted = (one.work / sum(one.predicted)) / (base.work / sum(base.predicted))
        table.add_row(
            one.policy,
            f"{statistics.mean(one.bubble):.3f}",
            *(f"{one.tokens_per_second:,.0f}", f"{one.tokens_per_second / base.tokens_per_second:.3f}"),
            *(f"{one.work_per_second:.3f}", f"{one.work_per_second / base.work_per_second:.3f}"),
            f"{predicted:.3f}",
            f"{statistics.mean(one.activations):.0f}, at most {max(one.activations):.0f}",
        )
    Console(width=120).print(table)


@click.command()
@click.option("--steps", default=8, show_default=True, help="Counted steps of each variant.")
@click.option("--micro-batches", default=4, show_default=True, help="Context windows of a step.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the results.")
def main(steps: int, micro_batches: int, output: Path | None) -> None:
    with shared_folder() as folder:
        results, costs = measure(folder, steps, micro_batches)
    if dist.get_rank() == 0:
        show(results, "two stages, one core each; x: relative to plain")
        save(output, results, costs.coefficients, micro_batches, steps)
    dist.destroy_process_group()


if __name__ == "__main__" and in_two_processes():
    main()
