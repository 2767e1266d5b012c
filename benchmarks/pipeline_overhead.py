"""What stages that take their shapes from the plan cost where nothing is to balance.

    python benchmarks/pipeline_overhead.py --output benchmarks/results/cpu/pipeline_overhead.json

trains the same model on the same documents in micro-batches of one length with torchtitan's own pipeline and
with ours, in turns, in the same two processes of one core each: 4 layers of width 128, 8 micro-batches, 1F1B.
Reported are the medians and the median over the pairs of steps of the quotient ours / stock.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch.distributed as dist
from common.trainers import STAGES, BenchTrainer, in_two_processes, make_config, make_corpus, shared_folder
from torchtitan.distributed.pipeline_parallel import pipeline_llm

from wlb_titan.runtime.pipeline.build import pipeline
from wlb_titan.runtime.pipeline.pass_timer import PassTimer

MICRO_BATCHES = 8
WARM_UP = 5


def stock(*arguments: Any, **keywords: Any) -> Any:
    """torchtitan's pipeline, with the timer that our trainer looks for, which it never asks."""
    schedule, *rest = pipeline_llm(*arguments, **keywords)
    schedule.timer = PassTimer(keywords["device"])
    return schedule, *rest


def measure(folder: Path, steps: int, window: int) -> dict[str, list[float]]:
    make_corpus(folder, (steps + WARM_UP + 4) * MICRO_BATCHES, window=window, sigma=1.0, median=window / 8)
    trainers = {}
    for name, pipelining in (("stock", stock), ("ours", pipeline)):
        config = make_config(folder, name, window=window, micro_batches=MICRO_BATCHES, layers=2 * STAGES)
        assert config.model_spec is not None
        config.model_spec = dataclasses.replace(config.model_spec, pipelining_fn=pipelining)
        trainers[name] = BenchTrainer(config)
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(-WARM_UP, steps):
        names = list(trainers) if number % 2 else list(trainers)[::-1]
        for name in names:
            took = trainers[name].timed_step()
            if number >= 0:
                seconds[name].append(took)
    for trainer in trainers.values():
        trainer.close()
    return seconds


@click.command()
@click.option("--steps", default=60, show_default=True, help="Counted steps of each.")
@click.option("--window", default=2048, show_default=True, help="Tokens of every micro-batch.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the results.")
def main(steps: int, window: int, output: Path | None) -> None:
    with shared_folder() as folder:
        seconds = measure(folder, steps, window)
    if dist.get_rank() == 0:
        quotients = np.array(seconds["ours"]) / np.array(seconds["stock"])
        low, middle, high = np.quantile(quotients, [0.25, 0.5, 0.75])
        for name, values in seconds.items():
            print(f"{name:6} median step {statistics.median(values) * 1e3:8.1f} ms")
        print(f"ours / stock: median {middle:.4f}, half of the pairs between {low:.4f} and {high:.4f}")
        if output is not None:
            settings = {"window": window, "micro_batches": MICRO_BATCHES, "steps": steps}
            result = {"settings": settings, "median_quotient": float(middle), "seconds": seconds}
            output.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__" and in_two_processes():
    main()
