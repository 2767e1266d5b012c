"""Trainers of the tests, as bases: `trainers:probed` writes gradients, `trainers:watched` what a step waits
for, `trainers:failing` fails on rank 1, `trainers:lopsided` routes all tokens to two of four experts."""

import json
import signal
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
import torch.distributed as dist
from bases import llama, scaled_llama, trained_by
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.components import metrics as titan
from triton import knobs

from wlb_titan.runtime import metrics, validator
from wlb_titan.runtime.compat import process_groups
from wlb_titan.runtime.models.bases import base_config
from wlb_titan.runtime.trainer import Trainer

GRADIENTS = "gradients.pt"
WEIGHTS = "weights.pt"  # of averaging.py
WAITED = "waits-{rank}.jsonl"
WAITS = {
    "aten._local_scalar_dense.default",  # item(), float(), a tensor as a condition
    *("aten.equal.default", "aten.masked_select.default", "aten.nonzero.default"),
    *("aten.repeat_interleave.Tensor", "aten._unique2.default"),
}


def gathered(trainer, of, alike=False):
    """`of(parameter)` of the whole model by name, on rank 0, else None; bit by bit the same if `alike`."""
    named = [named for part in trainer.model_parts for named in part.named_parameters()]
    mine = {clean(name): whole(of(p)) for name, p in named if p.requires_grad or of(p) is not None}
    everything = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everything)
    if everything is None:
        return None
    found = {}
    for part in everything:
        for name, tensor in part.items():
            assert torch.equal(found.setdefault(name, tensor), tensor) or not alike, name
    return found


def whole(tensor):
    if tensor is None:
        return torch.zeros(())  # a gradient that is missing is an error like any other
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def clean(name):
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


class ProbingTrainer(Trainer):
    """Writes the gradients of its first step."""

    def train_step(self, data_iterator):
        super().train_step(data_iterator)
        if self.step == 1:
            gradients = gathered(self, lambda p: p.grad)
            if gradients is not None:
                torch.save(gradients, Path(self.config.dump_folder) / GRADIENTS)


def probed():
    config = scaled_llama()
    config.training.max_norm = 1e9  # gradients as they are, not clipped
    return trained_by(ProbingTrainer, config)


class StillTrainer(Trainer):
    """Its weights stay as they are."""

    def update(self):
        return torch.zeros(())


class FailingTrainer(Trainer):
    def train_step(self, data_iterator):
        if self.step == 2 and dist.get_rank() == 1:
            raise RuntimeError("rank 1 has met its test")
        super().train_step(data_iterator)


class DivergingTrainer(Trainer):
    """Its norm is NaN on rank 1 from step 5 on; where no step is to be saved, it is asked to stop."""

    def update(self):
        norm = super().update()
        if self.step < 5 or dist.get_rank() != 1:
            return norm
        if self.step == 5 and self.checkpointer.interval > self.config.training.steps:
            signal.raise_signal(signal.SIGTERM)
        return norm * float("nan")


class ApartTrainer(Trainer):
    """Its ranks share micro-batches, and know other things of them from the second step on."""

    def train_step(self, data_iterator):
        super().train_step(data_iterator)
        self.dataloader._own_digest ^= dist.get_rank()


class AskedTrainer(Trainer):
    """Asked on rank 1 to stop in its first micro-batch of validation, of which each takes a while."""

    def __init__(self, config, **given):
        super().__init__(config, **given)
        self.asked, self.loss_of_validation = False, self.validator._loss
        self.validator._loss = self.validated

    def validated(self, *arguments):
        if not self.asked and dist.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM)
        self.asked = True
        time.sleep(0.2)
        return self.loss_of_validation(*arguments)


class LopsidedTrainer(Trainer):
    def __init__(self, config, corpus=None):
        super().__init__(config, corpus)
        for part in self.model_parts:
            for name, bias in part.named_buffers():
                if name.endswith("expert_bias_E"):
                    bias[:2] = 100


def lopsided():
    return trained_by(LopsidedTrainer, base_config("bases:qwen3_moe"))


class ClockedTrainer(Trainer):
    """By its clock a step takes a second, and a micro-batch of validation 100."""

    def __init__(self, config, **given):
        self.now = 0.0
        for module in (titan, metrics, validator):
            module.time = SimpleNamespace(perf_counter=lambda: self.now, monotonic=time.monotonic)
        super().__init__(config, **given)
        self.loss_of_validation, self.validator._loss = self.validator._loss, self.validated

    def train_step(self, data_iterator):
        self.now += 1
        super().train_step(data_iterator)

    def validated(self, *arguments):
        self.now += 100
        return self.loss_of_validation(*arguments)


def __getattr__(name):
    """`failing`: `llama` with `FailingTrainer`; and so the others."""
    trainer = globals().get(f"{name.capitalize()}Trainer")
    if trainer is None:
        raise AttributeError(name)
    return lambda: trained_by(trainer, llama())


class Watch(TorchDispatchMode):
    """Counts operations, among them those on an accelerator's tensors for which the host would wait."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counted[str(operation)] += 1
        return operation(*args, **(kwargs or {}))

    @property
    def waits(self):
        return sorted(WAITS & self.counted.keys())


@contextmanager
def noticed_by_cuda():
    """A list that gets what CUDA itself says of the host waiting; nothing where there is none."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        yield found
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
    found += [str(one.message) for one in caught if "synchronizing CUDA operation" in str(one.message)]


class WatchingTrainer(Trainer):
    """Writes what of each step waits for the device or compiles."""

    def train_step(self, data_iterator):
        timeouts, compiled = [], []
        for group in process_groups():
            (backend,) = {group._get_backend(device) for device in group._device_types}
            timeouts.append(backend.options._timeout.total_seconds())
        knobs.runtime.jit_post_compile_hook = lambda **what: compiled.append(what["repr"])
        with noticed_by_cuda() as by_cuda, Watch() as watch:
            super().train_step(data_iterator)
        record = {"waits": watch.waits + by_cuda, "operations": watch.counted.total(), "compiled": compiled}
        record |= {"longest": self.dataloader.plan.longest, "timeouts": timeouts}
        with (Path(self.config.dump_folder) / WAITED.format(rank=dist.get_rank())).open("a") as file:
            file.write(json.dumps(record) + "\n")


def watched(base=llama):
    return trained_by(WatchingTrainer, base())


class WorkerTrainer(Trainer):
    """Shares the meshes of earlier trainers of its layout, and keeps its last step's norm and its part of the
    loss.

    DTensor remembers how an operation is sharded together with the mesh, also for an equal mesh made later,
    and FSDP insists on one and the same mesh object.
    """

    known: ClassVar[dict] = {}

    def init_distributed(self):
        dims = super().init_distributed()
        degrees = (dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp, dims.pp, dims.ep)
        return self.known.setdefault(degrees, dims)

    def report(self, step, loss, grad_norm, *arguments):
        self.loss, self.norm = loss, float(grad_norm)
        super().report(step, loss, grad_norm, *arguments)
