"""The base `clocked:config`, by whose clock a step takes a second, and a micro-batch of validation 100."""

from dataclasses import dataclass
from types import SimpleNamespace

from bases import llama, trained_by
from torchtitan.components import metrics as titan

from wlb_titan.runtime import metrics, validator
from wlb_titan.runtime.trainer import Trainer


class ClockedTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config):
        self.now = 0.0
        for module in (titan, metrics, validator):
            module.time = SimpleNamespace(perf_counter=lambda: self.now)
        super().__init__(config)
        self.loss_of_validation, self.validator._loss = self.validator._loss, self.validated

    def train_step(self, data_iterator):
        self.now += 1
        super().train_step(data_iterator)

    def validated(self, *arguments):
        self.now += 100
        return self.loss_of_validation(*arguments)


def config():
    return trained_by(ClockedTrainer, llama())
