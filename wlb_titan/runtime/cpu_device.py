"""Lets torchtitan train on a machine without an accelerator, or as if it had none.

torchtitan picks its device when `torchtitan.tools.utils` is imported, and falls back to "cuda". This is the
only place that replaces another package's names, and only where torch finds no accelerator.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


class CpuDeviceModule:
    """`torch.cuda`, as far as torchtitan uses it, for the CPU."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object = None) -> str:
        return platform.processor() or "cpu"

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, device: object = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass


class GlooCollectives:
    """`torch.distributed` with an all-to-all of tensors of different sizes, for experts, which gloo lacks."""

    def __getattr__(self, name: str) -> object:
        return getattr(dist, name)

    def all_to_all(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup | None = None
    ) -> None:
        """Sends `inputs[r]` to rank r and receives `outputs[r]` from it; sizes differ in dimension 0 only."""
        received, sizes = torch.cat(outputs), [len(output) for output in outputs]
        dist.all_to_all_single(received, torch.cat(inputs), sizes, [len(i) for i in inputs], group=group)
        for output, part in zip(outputs, received.split(sizes), strict=True):
            output.copy_(part)


def add_up_by_sums(parts: Sequence[nn.Module]) -> None:
    """Has FSDP scale gradients by itself: gloo has no premultiplied sum."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def use_cpu_without_accelerator() -> bool:
    """Makes torchtitan use the CPU if there is no accelerator; returns whether it does. Call it before
    torchtitan is imported: its other parts copy the device."""
    if torch.accelerator.is_available():
        return False
    from torchtitan.tools import utils

    if utils.device_type != "cpu":
        assert "torchtitan.distributed.utils" not in sys.modules, "called too late: the device was copied"
        utils.device_type = "cpu"
        utils.device_module = CpuDeviceModule()
        utils.get_local_device = lambda: torch.device("cpu")
        # Of layers in float8 and fewer bits: files are read on login nodes, too. On the device that trains
        # torchtitan asks again, or `float8.check_on_cpu`.
        utils.has_cuda_capability = lambda *capability: capability in ((8, 9), (10, 0))
        spmd.set_dist(GlooCollectives())
    return True
