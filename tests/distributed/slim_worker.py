"""Trains steps of slices in many layouts, one after the other in the same processes, beside a plain process.

`slim_worker.py JOBS.json`, with what torchrun sets in the environment. The file holds "results" (the file to
write) and "cases" (a name, a corpus and arguments each). The plain process has every document of a step
whole and by itself, and slices nothing.
"""

from __future__ import annotations

import json
import os
import sys

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
from pipeline_reference import Reference, Sequence, differences  # noqa: E402
from pipeline_worker import WorkerTrainer, added_up, gathered, make_config  # noqa: E402
from torchtitan.components.loss import IGNORE_INDEX  # noqa: E402

from wlb_titan.context import STRATEGIES  # noqa: E402
from wlb_titan.packing import POLICIES  # noqa: E402
from wlb_titan.plan import ID, PREFIX, START, TOTAL  # noqa: E402

VOCABULARY = 512  # the corpus has 500


class SlimTrainer(WorkerTrainer):
    """Keeps the loss of its last step."""

    def report(self, step, loss, *arguments):
        self.loss = loss


def build(
    corpus, name, *, schedule="1F1B", pp=1, cp=1, tp=1, dp=1, replicate=1, sharding, slim, compiled, **options
):
    degrees = {
        "pipeline_parallel_degree": pp,
        "context_parallel_degree": cp,
        "tensor_parallel_degree": tp,
        "data_parallel_shard_degree": dp,
        "data_parallel_replicate_degree": replicate,
    }
    folder = os.path.join(os.path.dirname(corpus), "runs", name)
    config = make_config(
        corpus,
        folder,
        layers=4,
        schedule=schedule,
        degrees=degrees,
        micro_batches=4 // (dp * replicate),
        vocabulary=VOCABULARY,
        **options,
    )
    config.optimizer.param_groups[0].optimizer_kwargs["lr"] = 0.0
    config.training.max_norm = 1e9
    config.metrics.log_freq = 1
    config.compile.enable, config.compile.backend = compiled, "aot_eager"
    config.wlb.packing = POLICIES.configure("slim", **{"cost_model": "quadratic:1,1000", **slim})
    config.wlb.sharding = STRATEGIES.configure(**sharding)
    return config, SlimTrainer(config)


def whole_documents(trainer, plan):
    """The pieces that a plan trains, each as a sequence of its own."""
    sequences = []
    for m in plan.packs:
        for document, slices in zip(m.documents, m.slices, strict=True):
            if slices[PREFIX] > 0:
                continue
            (row,) = trainer.planned._planner.rows_of(document[[ID]])
            start, length = int(document[START]), int(slices[TOTAL])
            corpus = trainer.planned.corpus
            stop = min(start + length + 1, int(corpus.lengths[row]))
            read = np.array(corpus.tokens(row, start, stop - start), dtype=np.int64)
            labels = np.full(length, IGNORE_INDEX, dtype=np.int64)
            labels[: len(read) - 1] = read[1:]
            lengths = np.array([length])
            sequences.append(Sequence(read[:length], labels, np.arange(length), lengths))
    return sequences


def run_case(*, corpus, name, steps=1, sharding=None, slim=None, compiled=False, **options):
    """Records of steps: loss and its reference, the worst error of a gradient, and how long packs are."""
    config, trainer = build(
        corpus, name, sharding=sharding or {"name": "per_sequence"}, slim=slim, compiled=compiled, **options
    )
    weights = gathered(trainer, lambda p: p)
    reference = Reference(config, weights) if weights else None
    last = not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage
    records, loader = [], iter(trainer.planned)
    for number in range(steps):
        trainer.step = number + 1
        trainer.train_step(loader)
        plan = trainer.planned.plan
        record = {"loss": added_up(trainer, [trainer.loss] if last else [])}
        gradients = gathered(trainer, lambda p: p.grad)
        if reference:
            sequences = whole_documents(trainer, plan)
            record["reference"], expected = reference.step([sequences])
            record["error"], record["worst"] = differences(gradients, expected)
            record["longest_pack"] = max(m.length for m in plan.micro_batches)
            record["longest_document"] = int(plan.document_lengths.max())
            record["merged"] = [list(m.merged) for m in plan.packs if m.merged]
        records.append(record)
    trainer.close()
    return records


def main():
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    results = {}
    for case in jobs["cases"]:
        results[case["name"]] = run_case(**case)
        if dist.get_rank() == 0:
            with open(jobs["results"], "w") as file:
                json.dump(results, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
