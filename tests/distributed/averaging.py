"""Bases whose trainers write their weights: with the examples' `LocalSgd`, and a naive reference of it."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from bases import llama, trained_by
from own_policies.local_sgd import LocalSgd
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from trainers import WEIGHTS, clean, gathered

from wlb_titan.config.documents import training_documents
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.runtime.trainer import Trainer

RATES = {"SGD": 1.0, "AdamW": 0.01}


class WritingTrainer(Trainer):
    def train_step(self, data_iterator):
        super().train_step(data_iterator)
        if self.step == self.config.training.steps:
            weights = gathered(self, lambda p: p, alike=True)  # all ranks are the same in the end
            if weights is not None:
                torch.save(weights, Path(self.config.dump_folder) / WEIGHTS)


class ReferenceTrainer(WritingTrainer):
    """Local SGD in one process: each replica has weights and an optimizer, and its turn in the model."""

    @dataclass(kw_only=True, slots=True)
    class Config(WritingTrainer.Config):
        replicas: int = 1
        every: int = 1
        outer_rate: float = 1.0

    def train_step(self, data_iterator):
        config, parameters = self.config, list(self.model_parts[0].parameters())
        model = [local(weight) for weight in parameters]
        if self.step == 1:
            degrees = Degrees(own=(LocalSgd.Config(degree=config.replicas),))
            job = dataclasses.replace(self.job, degrees=degrees)
            self.plans = job.planner(training_documents(config.wlb))
            self.last = [weight.clone() for weight in model]
            self.weights = [[weight.clone() for weight in model] for _ in range(config.replicas)]
            optimizer = type(self.optimizers.optimizers[0])
            self.own_optimizers = [optimizer(weights, weight_decay=0.01) for weights in self.weights]
        step, plan = next(data_iterator), self.plans.next()
        numbered = zip(step.plan.micro_batches, step.items, strict=True)
        items = {micro_batch.documents.tobytes(): item for micro_batch, item in numbered}
        labels, total = torch.tensor(step.labels / config.replicas), 0.0
        for rank, (weights, optimizer) in enumerate(zip(self.weights, self.own_optimizers, strict=True)):
            self.optimizers.zero_grad()
            with torch.no_grad():
                torch._foreach_copy_(model, weights)
            for micro_batch in plan.of_rank(rank):
                total += self.forward_backward([items[micro_batch.documents.tobytes()]], labels)
            for weight, parameter in zip(weights, parameters, strict=True):
                weight.grad = local(parameter.grad).clone()
            optimizer.param_groups[0]["lr"] = self.lr_schedulers.schedulers[0].get_last_lr()[0]
            optimizer.step()
        self.lr_schedulers.step()
        if self.step % config.every == 0 or self.step == config.training.steps:
            self.average()
        with torch.no_grad():
            torch._foreach_copy_(model, self.weights[0])
        self.report(step, total / config.replicas, torch.zeros(()), {})
        if self.step == config.training.steps:
            names = (name for name, _ in self.model_parts[0].named_parameters())
            saved = dict(zip(map(clean, names), model, strict=True))
            torch.save(saved, Path(config.dump_folder) / WEIGHTS)

    def average(self):
        for place, last in enumerate(self.last):
            mean = torch.stack([weights[place] for weights in self.weights]).mean(dim=0)
            last += self.config.outer_rate * (mean - last)
            for weights in self.weights:
                weights[place].copy_(last)
            states = [o.state[o.param_groups[0]["params"][place]] for o in self.own_optimizers]
            for name in [name for name, value in states[0].items() if value is not None and value.ndim]:
                mean = torch.stack([state[name] for state in states]).mean(dim=0)
                for state in states:
                    state[name].copy_(mean)


def local(tensor):
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


class Optimizers(OptimizersContainer):
    """torchtitan's, with SGD."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name):
        return getattr(torch.optim, name)


def _base(trainer, optimizer):
    base = llama()
    base.training.max_norm = 1e9  # replicas clip by their own norms
    settings = {"lr": RATES[optimizer], "weight_decay": 0.01}
    groups = [ParamGroupConfig(pattern=".*", optimizer_name=optimizer, optimizer_kwargs=settings)]
    base.optimizer = Optimizers.Config(param_groups=groups, implementation="for-loop")
    return trained_by(trainer, base)


sgd, adamw = partial(_base, WritingTrainer, "SGD"), partial(_base, WritingTrainer, "AdamW")
reference_sgd = partial(_base, ReferenceTrainer, "SGD")
reference_adamw = partial(_base, ReferenceTrainer, "AdamW")
