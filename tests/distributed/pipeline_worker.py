"""Runs pipeline cases one after the other in the same processes and compares each with one plain process.

Its one argument is a JSON file, and its environment as torchrun sets it. The file holds "results" (the file
to write) and "cases" (by name: a kind, and arguments). Each case has a "corpus": a trainer needs one, but the
micro-batches are made here.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import sys
from typing import ClassVar

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from cases import run_cases  # noqa: E402
from pipeline_reference import (  # noqa: E402
    VOCABULARY,
    Reference,
    differences,
    step_data,
    valid_tokens,
)
from probing import gathered  # noqa: E402
from recording import RECORDER  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402

from wlb_titan.runtime.data.inputs import rank_item  # noqa: E402
from wlb_titan.runtime.models.bases import base_config  # noqa: E402
from wlb_titan.runtime.pipeline.build import pipeline  # noqa: E402
from wlb_titan.runtime.trainer import Trainer  # noqa: E402

SEQUENCE = 256  # longest micro-batch
CHECKPOINTING = {None: lambda: None, "full": FullAC.Config, "selective": SelectiveAC.Config}


def make_config(
    corpus,
    folder,
    *,
    layers,
    schedule,
    degrees,
    checkpointing=None,
    dtype="float32",
    micro_batches=4,
    timeout=60,
    vocabulary=VOCABULARY,
    **parallelism,
):
    """llama3_debug with a small vocabulary, `layers` layers and our stages."""
    config = base_config("llama3_debug")
    model = copy.deepcopy(config.model_spec.model)
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = vocabulary
    model.layers = [copy.deepcopy(model.layers[i % 4]) for i in range(layers)]
    config.model_spec = dataclasses.replace(config.model_spec, model=model, pipelining_fn=pipeline)
    config.loss.loss_fn.global_vocab_size = vocabulary
    config.loss.num_chunks = 2
    config.activation_checkpoint = CHECKPOINTING[checkpointing]()
    config.training = dataclasses.replace(
        config.training,
        seq_len=SEQUENCE,
        local_batch_size=micro_batches,
        global_batch_size=-1,
        mixed_precision_param=dtype,
    )
    config.parallelism = dataclasses.replace(
        config.parallelism, pipeline_parallel_schedule=schedule, **degrees, **parallelism
    )
    config.comm = dataclasses.replace(
        config.comm,
        init_timeout_seconds=timeout,
        train_timeout_seconds=timeout,
        trace_buf_size=0,  # torch's flight recorder grows by 1 KiB for each of its first 20,000 collectives
    )
    config.wlb.corpus.path = corpus
    config.dump_folder = folder
    return config


class WorkerTrainer(Trainer):
    """A trainer that shares the meshes of earlier trainers of its layout.

    DTensor remembers how an operation is sharded together with the mesh, also for an equal mesh made later,
    and FSDP insists on one and the same mesh object.
    """

    known: ClassVar[dict[tuple[int, ...], ParallelDims]] = {}

    def init_distributed(self):
        dims = super().init_distributed()
        degrees = (dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp, dims.pp, dims.ep)
        return self.known.setdefault(degrees, dims)


def build(corpus, name, *, schedule, layers, pp, cp=1, tp=1, dp=1, replicate=1, **options):
    degrees = {
        "pipeline_parallel_degree": pp,
        "context_parallel_degree": cp,
        "tensor_parallel_degree": tp,
        "data_parallel_shard_degree": dp,
        "data_parallel_replicate_degree": replicate,
    }
    folder = os.path.join(os.path.dirname(corpus), "runs", name)
    config = make_config(corpus, folder, layers=layers, schedule=schedule, degrees=degrees, **options)
    return config, WorkerTrainer(config)


def processed(trainer, micro_batches):
    """What the trainer hands to the pipeline for these micro-batches."""
    moved = []
    rank = trainer.config.dataloader.context_rank
    for s in micro_batches:
        strategy = trainer.job.strategy
        shards = strategy.shard(s.lengths, len(s.tokens))[1] if strategy is not None else None
        item = rank_item(s.tokens, s.labels, s.positions, s.lengths, strategy, shards, rank)
        moved.append(trainer.post_dataloading_process(*item))
    return moved


def run_case(corpus, *, name, steps, evaluate=(), cp=1, dp=1, replicate=1, **options):
    """Steps of the given lengths against the reference, evaluation before the steps in `evaluate`.

    Returns one record a step: the loss and its reference, the worst error of a gradient and whose it is, and
    where there was an evaluation its loss and reference. They are complete on rank 0.
    """
    config, trainer = build(
        corpus, name, cp=cp, dp=dp, replicate=replicate, micro_batches=len(steps[0]), **options
    )
    weights = gathered(trainer, lambda p: p)
    reference = Reference(config, weights) if weights else None
    data_parallel = dp * replicate
    rank = trainer.parallel_dims.get_mesh("batch").get_local_rank() if data_parallel > 1 else 0
    records = []
    for step, lengths in enumerate(steps):
        data = step_data(step, lengths, data_parallel)
        record = {"step": step}
        if step in evaluate:
            with RECORDER, torch.no_grad(), trainer.train_context():
                loss = trainer.pp_schedule.eval(processed(trainer, data[rank]))
            record["eval"] = added_up(trainer, loss) / int(valid_tokens(data))
            record["eval_reference"] = reference.step(data, backward=False)[0] if reference else None
        trainer.optimizers.zero_grad()
        record["loss"] = added_up(trainer, train_step(trainer, data, rank))
        gradients = gathered(trainer, lambda p: p.grad)
        if reference:
            record["reference"], expected = reference.step(data)
            record["error"], record["worst"] = differences(gradients, expected)
        records.append(record)
    records[-1]["met"] = RECORDER.met()
    trainer.close()
    return records


def run_drill(corpus, *, name, victim, signal_number, **options):
    """The second step, in which rank `victim` gets a signal in its second forward pass."""
    _, trainer = build(corpus, name, **options)
    train_step(trainer, step_data(0, [64, 128, 32, 64], 1), 0)
    if dist.get_rank() == victim:
        passes = itertools.count()

        def strike(module, arguments):
            if next(passes) == 1:
                os.kill(os.getpid(), signal_number)

        trainer.model_parts[0].register_forward_pre_hook(strike)
    train_step(trainer, step_data(1, [32, 256, 64, 128], 1), 0)


def train_step(trainer, data, rank):
    """Forward and backward of rank `rank`'s micro-batches; the sum of the losses on the last stage."""
    RECORDER.latest = lambda: trainer.timer.latest
    with RECORDER, trainer.train_context():
        trainer.step_trace.begin(trainer.step)
        return trainer.pp_schedule.step(processed(trainer, data[rank]), valid_tokens(data))


def added_up(trainer, loss):
    """The sum over ranks of a loss, each counted once; needs every rank."""
    # A partial sum over data- and context-parallel ranks, and the same on tensor-parallel ones.
    mine = float(loss.to_local() if isinstance(loss, DTensor) else loss) / trainer.parallel_dims.tp
    total = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def main():
    kinds = {"case": run_case, "drill": run_drill}
    run_cases(lambda kind, **case: kinds[kind](**case))
    end()


def end():
    """Ends this process at once."""
    # Meshes keep the process groups of all cases alive, and their threads would go on while the interpreter
    # and the C++ library are taken down under them, which may abort.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
