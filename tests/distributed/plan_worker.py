"""Trains planned steps in many layouts, one after the other in the same processes, beside a plain process.

`plan_worker.py JOBS.json`, as `pipeline_worker`; the arguments of cases are those of `run_case`. The plain
process has every document of a step whole and by itself: it knows no packing, no sharding and no slices.
"""

from __future__ import annotations

import os

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
from cases import run_cases  # noqa: E402
from lab import CONFIG  # noqa: E402
from pipeline_reference import Reference, Sequence, differences  # noqa: E402
from pipeline_worker import WorkerTrainer, added_up, make_config  # noqa: E402
from probing import gathered  # noqa: E402
from recording import RECORDER  # noqa: E402
from torchtitan.components.loss import IGNORE_INDEX  # noqa: E402

from wlb_titan.context.strategy import STRATEGIES  # noqa: E402
from wlb_titan.packing import POLICIES  # noqa: E402
from wlb_titan.plan import ID, LENGTH, START  # noqa: E402
from wlb_titan.runtime.models.load import load_config  # noqa: E402

VOCABULARY = 512  # the corpus has 500
DEGREES = {
    "pp": "pipeline_parallel_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "dp": "data_parallel_shard_degree",
    "replicate": "data_parallel_replicate_degree",
}


class PlanTrainer(WorkerTrainer):
    """Keeps its part of the loss of its last step."""

    def report(self, step, loss, *arguments):
        self.loss = loss
        super().report(step, loss, *arguments)


def configuration(words=(), **options):
    """That of `experiment.toml` with these overrides, or that of a step in slices."""
    config = load_config(CONFIG, words, int(os.environ["WORLD_SIZE"])).config if words else sliced(**options)
    config.optimizer.param_groups[0].optimizer_kwargs["lr"] = 0.0
    config.training.max_norm = 1e9  # gradients as they are, not clipped
    config.metrics.log_freq = 1
    config.comm.trace_buf_size = 0  # as of `make_config`
    return config


def sliced(corpus, folder, *, schedule="1F1B", layers=2, sharding=None, slim, compiled=False, **options):
    degrees = {name: options.pop(short, 1) for short, name in DEGREES.items()}
    config = make_config(
        corpus,
        folder,
        layers=layers,
        schedule=schedule,
        degrees=degrees,
        micro_batches=-(-4 // (degrees[DEGREES["dp"]] * degrees[DEGREES["replicate"]])),
        vocabulary=VOCABULARY,
        **options,
    )
    config.compile.enable, config.compile.backend = compiled, "aot_eager"
    config.wlb.packing = POLICIES.configure("slim", **{"cost_model": "quadratic:1,1000", **slim})
    config.wlb.sharding = STRATEGIES.configure(**sharding or {"name": "per_sequence"})
    return config


def whole_documents(trainer, plan):
    """The pieces that a plan trains, each as a sequence of its own."""
    sequences = []
    for m in plan.packs:
        slices = m.slices
        if slices is None:  # PREFIX and TOTAL of pieces that are whole
            slices = np.stack([np.zeros(len(m.documents), int), m.documents[:, LENGTH]], axis=1)
        for document, (prefix, total) in zip(m.documents, slices, strict=True):
            if prefix > 0:
                continue
            (row,), _ = trainer.planned._planner.read(document[[ID]])
            start, length = int(document[START]), int(total)
            corpus = trainer.planned.corpus
            stop = min(start + length + 1, int(corpus.lengths[row]))
            read = np.array(corpus.tokens(row, start, stop - start), dtype=np.int64)
            labels = np.full(length, IGNORE_INDEX, dtype=np.int64)
            labels[: len(read) - 1] = read[1:]
            lengths = np.array([length])
            sequences.append(Sequence(read[:length], labels, np.arange(length), lengths))
    return sequences


def run_case(*, name, steps=(1,), **options):
    """Of each of these steps loss and reference, the worst error of a gradient, and how long packs are."""
    config = configuration(**options)
    trainer = PlanTrainer(config)
    weights = gathered(trainer, lambda p: p)
    reference = Reference(config, weights) if weights else None
    last = not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage
    records, loader = [], trainer.planned.steps(trainer.lower)
    for trainer.step in range(1, max(steps) + 1):
        if trainer.step not in steps:
            next(loader)
            continue
        RECORDER.latest = lambda: trainer.timer.latest
        with RECORDER:
            trainer.train_step(loader)
        plan = trainer.planned.plan
        record = {"loss": added_up(trainer, trainer.loss if last else 0.0)}
        gradients = gathered(trainer, lambda p: p.grad)
        if reference:
            sequences = whole_documents(trainer, plan)
            record["reference"], expected = reference.step([sequences])
            record["error"], record["worst"] = differences(gradients, expected)
            record["longest_pack"] = max(m.length for m in plan.micro_batches)
            record["longest_document"] = int(plan.document_lengths.max())
            record["merged"] = [list(m.merged) for m in plan.packs if m.merged]
        records.append(record)
    records[-1]["met"] = RECORDER.met()
    trainer.close()
    return records


def main():
    run_cases(run_case)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
