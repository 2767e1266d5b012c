"""The bases `counting:two` and `counting:four`, of so many layers, whose trainer writes how many calls of
Python functions each step makes in the thread that launches everything."""

import cProfile
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from bases import checkpointed

from wlb_titan.runtime.trainer import Trainer

FILE = "calls.txt"


class CountingTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data_iterator):
        with cProfile.Profile(builtins=False) as profile:
            super().train_step(data_iterator)
        calls = sum(entry.callcount for entry in profile.getstats())
        with open(Path(self.config.dump_folder) / FILE, "a") as file:
            file.write(f"{calls}\n")


def two():
    return counted(1)


def four():
    return counted(2)


def counted(times):
    """The multi-process tests' model, each of its two layers so many times."""
    base = checkpointed()
    model = base.model_spec.model
    model.layers = [layer for layer in model.layers for _ in range(times)]
    return CountingTrainer.Config(**{f.name: getattr(base, f.name) for f in dataclasses.fields(base)})
