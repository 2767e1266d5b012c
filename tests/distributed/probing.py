"""The base `probing:config`, whose trainer writes the gradients of its first step to a file."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from bases import llama
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
            mine = {
                name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): whole(p.grad)
                for part in self.model_parts
                for name, p in part.named_parameters()
            }
            everything = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(mine, everything)
            if everything is not None:
                gradients = {name: gradient for part in everything for name, gradient in part.items()}
                torch.save(gradients, Path(self.config.dump_folder) / FILE)


def whole(gradient):
    if gradient is None:
        return torch.zeros(())  # a gradient that is missing is an error like any other
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().clone()


def config() -> ProbingTrainer.Config:
    base = llama()
    base.training.max_norm = 1e9  # as they are, not clipped
    return ProbingTrainer.Config(**{f.name: getattr(base, f.name) for f in dataclasses.fields(base)})
