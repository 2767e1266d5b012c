"""How many calls of Python functions a step makes in the thread that launches everything: a worker, whose
cases are overrides, and the base `counting:four`."""

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

import cProfile  # noqa: E402

import torch.distributed as dist  # noqa: E402
from bases import checkpointed  # noqa: E402
from cases import run_cases  # noqa: E402
from lab import CONFIG  # noqa: E402
from pipeline_worker import WorkerTrainer  # noqa: E402

from wlb_titan.runtime.models.load import load_config  # noqa: E402


def four():
    """`bases:checkpointed`, each of its two layers twice."""
    base = checkpointed()
    model = base.model_spec.model
    model.layers = [layer for layer in model.layers for _ in range(2)]
    return base


def run_case(*, name, words):
    """The calls of the second step."""
    trainer = WorkerTrainer(load_config(CONFIG, words, 1).config)
    loader = iter(trainer.planned)
    for trainer.step in (1, 2):
        with cProfile.Profile(builtins=False) as profile:
            trainer.train_step(loader)
    trainer.close()
    return sum(entry.callcount for entry in profile.getstats())


def main():
    run_cases(run_case)
    dist.destroy_process_group()
