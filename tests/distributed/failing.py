"""What fails on rank 1: in step 2 the trainer of a base, which tests name as `failing:config`; as a worker,
where a case says so."""

import os
from dataclasses import dataclass

import torch
from bases import llama, trained_by
from cases import run_cases

from wlb_titan.runtime.trainer import Trainer


class FailingTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data_iterator):
        if self.step == 2 and torch.distributed.get_rank() == 1:
            raise RuntimeError("rank 1 has met its test")
        super().train_step(data_iterator)


def config():
    return trained_by(FailingTrainer, llama())


def run_case(name, aborts):
    if aborts and torch.distributed.get_rank() == 1:
        os.abort()
    return name


def main():
    torch.distributed.init_process_group("gloo")
    run_cases(run_case)
