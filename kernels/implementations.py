"""What computes a call of the op: the table of implementations, and the rule that takes one of them.

"auto" takes what was measured fastest (fastest.py); where nothing was measured, Triton on a GPU and the
reference on the CPU; under Triton's interpreter (TRITON_INTERPRET=1), which computes bfloat16 wrongly, Triton
for float16 and float32.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

from .fastest import FASTEST, HeadDims

PASSES = ("forward", "backward")
MAX_HEAD_DIM = 256
GLUON_HEAD_DIMS = (64, 128)
REFERENCE = "reference"  # its own judge, in float32


class Device(NamedTuple):
    """What the rule needs to know about a device."""

    type: str  # as of torch.device
    capability: tuple[int, int] | None = None  # of a GPU; None, not known yet, excludes nothing
    interpreted: bool = False  # whether Triton is there and runs its kernels on the CPU, for tests
    hip: bool = False  # an AMD GPU, whose capabilities are other numbers

    @property
    def family(self) -> int | None:
        """The major number of an NVIDIA GPU's compute capability, if it is known."""
        return self.capability[0] if self.capability and not self.hip else None

    @property
    def tma(self) -> bool:
        """Whether to load by TMA: on Hopper, and in the interpreter, which emulates it."""
        return self.type != "cuda" or self.family == 9


@cache
def device_of(device: torch.device) -> Device:
    """What the rule needs to know about a device."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return Device("cuda", capability, hip=torch.version.hip is not None)
    return Device(device.type, interpreted=_interpreting())


def _refused_by_triton(which: str, dims: HeadDims, dtype: torch.dtype, device: Device) -> str | None:
    on_gpu = device.type == "cuda"
    if not on_gpu and not device.interpreted:
        return f"needs a CUDA device, and runs on {device.type}"
    dtypes = (torch.float16, torch.bfloat16 if on_gpu else torch.float32)
    if dtype not in dtypes:
        return f"takes {dtypes[0]} and {dtypes[1]} here, got {dtype}"
    for name, dim in zip("qv", dims, strict=True):
        if dim > MAX_HEAD_DIM or dim % 8 != 0 or dim == 0:
            return f"takes head dims that are multiples of 8 up to {MAX_HEAD_DIM}, but {name} has {dim}"
    if device.capability and device.capability < (8, 0):
        return f"needs compute capability 8.0 or later, got {device.capability}"
    return None


def _refused_by_gluon(which: str, dims: HeadDims, dtype: torch.dtype, device: Device) -> str | None:
    if reason := _refused_by_triton(which, dims, dtype, device):  # some of its kernels are Triton's
        return reason
    if device.type != "cuda" or (device.capability and device.family != 9):
        return "needs an NVIDIA GPU of compute capability 9 (Hopper)"
    for name, dim in zip("qv", dims, strict=True):
        if dim not in GLUON_HEAD_DIMS:
            return f"takes head dims {GLUON_HEAD_DIMS}, but {name} has {dim}"
    return None


class Implementation(NamedTuple):
    """A line of the table.

    The module, imported when something is computed, as Triton may be absent, has

        forward(q, k, v, schedule, options): output (Tq, Nq, Dv) and log-sum-exp (Nq, Tq)
        backward(dout, dlse, saved, schedule, options): gradients of q, k and v
        cuts(shape, device): `tiles.Cut` of forward and backward, by which a profile predicts times

    and, if the backward can divide its work in several ways, divisions(q_heads, kv_heads, reach): those that
    it may choose, whatever the segments, and takes as a last argument.
    """

    module: str
    refuses: Callable[[str, HeadDims, torch.dtype, Device], str | None]
    """Why it cannot run a pass ("forward" or "backward") with head dims D and Dv; None if it can."""
    judge: str  # the implementation that self_check.py compares it with
    untimed_on: tuple[str, ...]  # where "auto" takes it without a measurement: "GPU", "CPU"


TABLE = {  # the fastest first
    "gluon": Implementation("gluon_launch", _refused_by_gluon, "triton", ()),
    "triton": Implementation("triton_launch", _refused_by_triton, REFERENCE, ("GPU", "CPU")),
    REFERENCE: Implementation("reference", lambda *_: None, REFERENCE, ("CPU",)),
}
IMPLEMENTATIONS = ("auto", *TABLE)  # what callers may ask for


@cache
def load(name: str) -> ModuleType:
    return import_module(f".{TABLE[name].module}", __package__)


@cache
def chosen(which: str, implementation: str, dims: HeadDims, dtype: torch.dtype, device: Device) -> str:
    """What runs a pass, "forward" or "backward", with head dims D and Dv, for a caller that asks for
    `implementation`. Raises ValueError, with the reason, if that cannot run it."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is none of {', '.join(IMPLEMENTATIONS)}")
    names = [implementation]
    if implementation == "auto":
        measured = FASTEST.get(device.family, {}).get(dims)
        kind = "GPU" if device.type == "cuda" else "CPU"
        names = [measured[PASSES.index(which)]] if measured else []
        names += [name for name in TABLE if kind in TABLE[name].untimed_on]
    for name in names:
        reason = TABLE[name].refuses(which, dims, dtype, device)
        if reason is None:
            return name
    raise ValueError(f"implementation {implementation!r} {reason}")


def _interpreting() -> bool:
    try:
        from triton import knobs
    except ImportError:
        return False
    return knobs.runtime.interpret


@cache
def units(device: torch.device) -> int:
    """Programs that run at a time: a GPU's multiprocessors. On a CPU the reference runs block after block."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
