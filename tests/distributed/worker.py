"""Runs the cases of `lab.Cases` one after the other in the same processes, beside a plain process. Its one
argument is a JSON file with "results", the file to write, and "cases": by name a kind, overrides of
experiment.toml in `words`, and other arguments of the function that runs the kind."""

import cProfile
import itertools
import json
import os
import sys
from hashlib import sha256

import numpy as np
import torch
import torch.distributed as dist
from lab import CONFIG
from pipeline_reference import Reference, Sequence, differences, step_data, valid_tokens
from recording import RECORDER
from test_gathered_keys import run_gather, run_order
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.loss import IGNORE_INDEX
from trainers import WorkerTrainer, gathered

from wlb_titan.files import save
from wlb_titan.plan import LENGTH, ROW, START, MicroBatch
from wlb_titan.runtime.dataloader import Item
from wlb_titan.runtime.models.load import load_config


def configured(words):
    config = load_config(CONFIG, words, int(os.environ["WORLD_SIZE"])).config
    config.training.max_norm = 1e9  # gradients as they are, not clipped
    return config


def build(words):
    config = configured(words)
    config.optimizer.param_groups[0].optimizer_kwargs["lr"] = 0.0
    config.comm.trace_buf_size = 0  # torch's flight recorder takes 1 KiB for each of its first 20,000 calls
    trainer = WorkerTrainer(config)
    RECORDER.latest = lambda: trainer.timer.latest
    for part in trainer.model_parts:
        for weight in part.parameters():
            disturb(weight)
    return trainer


@torch.no_grad()
def disturb(weight):
    """Adds noise to a weight: what begins at zero hides others."""
    noise = 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    if isinstance(weight, DTensor):
        noise = distribute_tensor(noise, weight.device_mesh, weight.placements, src_data_rank=None)
    weight.add_(noise)


def run_plan(*, name, words, steps=(1,)):
    """Planned steps against a process that has every document whole and by itself: it knows no packing, no
    sharding and no slices.

    Of each of these steps loss and reference, the worst error of a gradient, and how long packs are.
    """
    trainer = build(words)
    weights = gathered(trainer, lambda p: p)
    reference = Reference(trainer.config, weights) if weights else None
    last = not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage
    if trainer.config.validator.enable:  # which is to leave nothing behind
        trainer.validator.validate(trainer.model_parts, 0)
    records, loader = [], trainer.dataloader.steps(trainer.lower)
    for trainer.step in range(1, max(steps) + 1):
        if trainer.step not in steps:
            next(loader)
            continue
        with RECORDER:
            trainer.train_step(loader)
        plan = trainer.dataloader.plan
        record = {"loss": added_up(trainer, trainer.loss if last else 0.0), "norm": trainer.norm}
        gradients = gathered(trainer, lambda p: p.grad)
        if reference:
            record["reference"], expected = reference.step([whole_documents(trainer, plan)])
            record["error"], record["worst"] = differences(gradients, expected)
            norms = [gradient.double().norm() for gradient in expected.values()]
            record["reference_norm"] = float(torch.stack(norms).norm())
            record["longest_pack"] = max(m.length for m in plan.micro_batches)
            record["longest_document"] = int(plan.document_lengths.max())
            record["merged"] = [list(m.merged) for m in plan.packs if m.merged]
        records.append(record)
    records[-1]["met"] = RECORDER.met()
    trainer.close()
    return records


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
            row, start, length = int(document[ROW]), int(document[START]), int(total)
            corpus = trainer.dataloader.corpus
            stop = min(start + length + 1, int(corpus.lengths[row]))
            read = np.array(corpus.tokens(row, start, stop - start), dtype=np.int64)
            labels = np.full(length, IGNORE_INDEX, dtype=np.int64)
            learned = corpus.learned(row, start, len(read))[1:]
            labels[: len(read) - 1] = np.where(learned, read[1:], IGNORE_INDEX)
            weight = 1
            if trainer.config.wlb.loss_weight == "conversation":
                weight = 1 / max(trainer.dataloader._planner.labels_of(document[[ROW]])[0], 1)
            sequences.append(Sequence(read[:length], labels, np.arange(length), np.array([length]), weight))
    return sequences


def run_pipeline(*, name, words, steps, evaluate=()):
    """Steps of the given lengths against the reference, evaluation before the steps in `evaluate`.

    One record a step: the loss and its reference, the worst error of a gradient and whose it is, and where
    there was an evaluation its loss and reference. They are complete on rank 0.
    """
    trainer = build(words)
    weights = gathered(trainer, lambda p: p)
    reference = Reference(trainer.config, weights) if weights else None
    records = []
    for step, lengths in enumerate(steps):
        data = step_data(step, lengths, trainer.parallel_dims.data)
        record = {"step": step}
        if step in evaluate:
            with RECORDER, torch.no_grad(), trainer.train_context():
                loss = trainer.pp_schedule.step(processed(trainer, data), labels=None)
            record["eval"] = added_up(trainer, loss) / int(valid_tokens(data))
            record["eval_reference"] = reference.step(data, backward=False)[0] if reference else None
        trainer.optimizers.zero_grad()
        record["loss"] = added_up(trainer, train_step(trainer, data))
        gradients = gathered(trainer, lambda p: p.grad)
        if reference:
            record["reference"], expected = reference.step(data)
            record["error"], record["worst"] = differences(gradients, expected)
        records.append(record)
    records[-1]["met"] = RECORDER.met()
    trainer.close()
    return records


def processed(trainer, data):
    """What the trainer hands to the pipeline for this rank's micro-batches."""
    moved = []
    for s in data[trainer.parallel_dims.place("batch")]:
        documents = np.pad(s.lengths[:, None], ((0, 0), (LENGTH, 0)))
        pack = trainer.job.sharded([MicroBatch(documents, length=len(s.tokens))])[0]
        rank = trainer.parallel_dims.place("cp")
        moved.append(trainer.to_device(Item.of(pack, trainer.job, rank, s.tokens, s.labels, s.positions)))
    return moved


def train_step(trainer, data):
    """Forward and backward of this rank's micro-batches; the sum of the losses on the last stage."""
    with RECORDER, trainer.train_context():
        trainer.step_trace.begin(trainer.step)
        return trainer.pp_schedule.step(processed(trainer, data), valid_tokens(data))


def added_up(trainer, loss):
    """The sum over ranks of a loss, each counted once; needs every rank."""
    # A partial sum over data- and context-parallel ranks, and the same on tensor-parallel ones.
    mine = float(loss.to_local() if isinstance(loss, DTensor) else loss) / trainer.parallel_dims.tp
    total = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def run_weights(*, name, words, steps=0):
    """Digests of all weights as they are drawn, and after so many steps at the configured rate; those whose
    halves are alike; how many tensors optimizers have; kinds of recomputation that ranks mix."""
    trainer = WorkerTrainer(configured(words))
    loader = trainer.dataloader.steps(trainer.lower)
    before, items = gathered(trainer, lambda p: p), []
    for trainer.step in range(1, steps + 1):
        step = next(loader)
        items += step.items
        trainer.train_step(iter([step]))
    after = gathered(trainer, lambda p: p)
    kinds = [None] * dist.get_world_size()
    dist.all_gather_object(kinds, [kind for item in items for kind in item.mask.kinds])
    trainer.close()
    if after is None:
        return None
    alike = [key for key, w in before.items() if w.dim() > 1 and torch.equal(*w[: len(w) // 2 * 2].chunk(2))]
    optimized = sum(len(group["params"]) for o in trainer.optimizers for group in o.param_groups)
    weights = {"before": digests(before), "after": digests(after), "alike": alike}
    return weights | {"optimized": optimized, "kinds": sorted(set(itertools.chain(*kinds)))}


def digests(weights):
    return {name: sha256(weight.float().numpy().tobytes()).hexdigest() for name, weight in weights.items()}


def run_drill(*, name, words, signal_number):
    """The second step, in which rank 1 gets a signal in its second forward pass."""
    trainer = build(words)
    train_step(trainer, step_data(0, [64, 128, 32, 64], 1))
    if dist.get_rank() == 1:
        passes = itertools.count()

        def strike(module, arguments):
            if next(passes) == 1:
                os.kill(os.getpid(), signal_number)

        trainer.model_parts[0].register_forward_pre_hook(strike)
    train_step(trainer, step_data(1, [32, 256, 64, 128], 1))


def run_calls(*, name, words):
    """How many calls of Python functions the second step makes in the thread that launches everything."""
    trainer = build(words)
    loader = iter(trainer.dataloader)
    for trainer.step in (1, 2):
        with cProfile.Profile(builtins=False) as profile:
            trainer.train_step(loader)
    trainer.close()
    return sum(entry.callcount for entry in profile.getstats())


def run_abort(*, name, words, aborts):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if aborts and dist.get_rank() == 1:
        os.abort()
    return name


RUNS = (run_plan, run_pipeline, run_weights, run_drill, run_calls, run_abort, run_gather, run_order)
KINDS = {run.__name__.removeprefix("run_"): run for run in RUNS}


def main():
    """Once a case is in the file, all ranks have come to its end: the first that is missing is the one in
    which a rank died."""
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    results, written = {}, jobs["results"]
    for name, case in jobs["cases"].items():
        results[name] = KINDS[case.pop("kind")](name=name, **case)
        dist.barrier()
        if dist.get_rank() == 0:
            save(written, results)
    # Meshes keep the process groups of all cases alive, and their threads would go on while the interpreter
    # and the C++ library are taken down under them, which may abort.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
