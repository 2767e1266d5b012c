"""The bases `probing:config` and `probing:scaled`, whose trainer writes the gradients of its first step to a
file; and how all ranks' tensors come together."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from bases import llama, scaled_llama, trained_by
from torch.distributed.tensor import DTensor

from wlb_titan.runtime.trainer import Trainer

FILE = "gradients.pt"
WEIGHTS = "weights.pt"  # of averaging.py


class ProbingTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data_iterator):
        super().train_step(data_iterator)
        if self.step == 1:
            gradients = gathered(self, lambda p: p.grad)
            if gradients is not None:
                torch.save(gradients, Path(self.config.dump_folder) / FILE)


def gathered(trainer, of):
    """`of(parameter)` of the whole model by name, on rank 0; None on the others."""
    mine = {clean(name): whole(of(p)) for part in trainer.model_parts for name, p in part.named_parameters()}
    everything = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everything)
    return {name: t for part in everything for name, t in part.items()} if everything else None


def whole(tensor):
    if tensor is None:
        return torch.zeros(())  # a gradient that is missing is an error like any other
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def clean(name):
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def config():
    return _probed(llama())


def scaled():
    return _probed(scaled_llama())


def _probed(base):
    base.training.max_norm = 1e9  # gradients as they are, not clipped
    return trained_by(ProbingTrainer, base)
