"""The base `watching:config`, whose trainer writes what of a step would wait for the device or compiles."""

import json
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from bases import llama, trained_by
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from wlb_titan.runtime.compat import process_groups
from wlb_titan.runtime.trainer import Trainer

FILE = "waits-{rank}.jsonl"
WAITS = {
    "aten._local_scalar_dense.default",  # item(), float(), a tensor as a condition
    "aten.equal.default",
    "aten.masked_select.default",
    "aten.nonzero.default",
    "aten.repeat_interleave.Tensor",
    "aten._unique2.default",
}


class Watch(TorchDispatchMode):
    """Notes the operations on an accelerator's tensors for which the host would wait, and counts all."""

    def __init__(self):
        super().__init__()
        self.waits, self.operations = [], 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.operations += 1
        if str(operation) in WAITS:
            self.waits.append(str(operation))
        return operation(*args, **(kwargs or {}))


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
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data_iterator):
        timeouts = [seconds(group) for group in process_groups()]
        compiled = []
        knobs.runtime.jit_post_compile_hook = lambda **what: compiled.append(what["repr"])
        with noticed_by_cuda() as by_cuda, Watch() as watch:
            super().train_step(data_iterator)
        path = Path(self.config.dump_folder) / FILE.format(rank=dist.get_rank())
        record = {
            "waits": watch.waits + by_cuda,
            "operations": watch.operations,
            "longest": self.planned.plan.longest,
            "compiled": compiled,
            "timeouts": timeouts,
        }
        lines = path.read_text().splitlines() if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*lines, json.dumps(record)]) + "\n")


def seconds(group):
    """After which a process group gives others up."""
    (backend,) = {group._get_backend(device) for device in group._device_types}
    return backend.options._timeout.total_seconds()


def config():
    return watched(llama())


def watched(base):
    return trained_by(WatchingTrainer, base)
