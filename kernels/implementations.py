"""What computes a call of the op: the table of implementations, and the rule that takes one of them.

"auto" takes what was measured fastest (fastest.py); where nothing was measured, the first of the table that
is for the device's kind and can. docs/kernels.md ("Use") lists what that is.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

from .fastest import BLACKWELL_FAMILY, FASTEST, HOPPER_FAMILY, HeadDims

PASSES = ("forward", "backward")
MAX_HEAD_DIM = 256
GLUON_HEAD_DIMS = (64, 128)
REFERENCE = "reference"  # its own judge, in float32
TORCH = "torch"


Reason = str | None  # why an implementation cannot run a pass; None if it can


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
        return self.type != "cuda" or self.family == HOPPER_FAMILY

    @property
    def kind(self) -> str:
        """What "auto" tells devices by where nothing was measured."""
        if self.type != "cuda":
            return "interpreter" if self.interpreted else "CPU"
        kinds = {HOPPER_FAMILY: "Hopper", BLACKWELL_FAMILY: "Blackwell"}
        return "AMD" if self.hip else kinds.get(self.family, "NVIDIA")


@cache
def device_of(device: torch.device) -> Device:
    """What the rule needs to know about a device."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return Device("cuda", capability, hip=torch.version.hip is not None)
    try:
        from triton import knobs
    except ImportError:
        return Device(device.type)
    return Device(device.type, interpreted=knobs.runtime.interpret)


def _refused_by_triton(which: str, dims: HeadDims, dtype: torch.dtype, device: Device, *_: bool) -> Reason:
    on_gpu = device.type == "cuda"
    if not on_gpu and not device.interpreted:
        return f"needs a CUDA device, and runs on {device.type}"
    dtypes = (torch.float16, torch.bfloat16 if on_gpu else torch.float32)  # interpreted, bfloat16 is wrong
    if dtype not in dtypes:
        return f"takes {dtypes[0]} and {dtypes[1]} here, got {dtype}"
    for name, dim in zip("qv", dims, strict=True):
        if dim > MAX_HEAD_DIM or dim % 8 != 0 or dim == 0:
            return f"takes head dims that are multiples of 8 up to {MAX_HEAD_DIM}, but {name} has {dim}"
    if device.capability and device.capability < (8, 0):
        return f"needs compute capability 8.0 or later, got {device.capability}"
    return None


def _refused_by_gluon(which: str, dims: HeadDims, dtype: torch.dtype, device: Device, *_: bool) -> Reason:
    if reason := _refused_by_triton(which, dims, dtype, device):  # some of its kernels are Triton's
        return reason
    if device.type != "cuda" or (device.capability and device.family != HOPPER_FAMILY):
        return "needs an NVIDIA GPU of compute capability 9 (Hopper)"
    for name, dim in zip("qv", dims, strict=True):
        if dim not in GLUON_HEAD_DIMS:
            return f"takes head dims {GLUON_HEAD_DIMS}, but {name} has {dim}"
    return None


def _refused_by_fa4(
    which: str, dims: HeadDims, dtype: torch.dtype, device: Device, windowed=False, lse_gradient=False
) -> Reason:
    if device.type != "cuda" or device.hip or (device.capability and device.kind == "NVIDIA"):
        return "needs an NVIDIA GPU of compute capability 9 or 10 (Hopper, Blackwell)"
    if reason := _refused_by_triton(which, dims, dtype, device):  # the same types and head dims, or fewer
        return reason
    blackwell, equal = device.kind == "Blackwell", dims[0] == dims[1]
    if dims != (192, 128) and not (equal and (not blackwell or dims[0] <= 128 or dims[0] == 256)):
        return f"takes head dims (192, 128) and equal ones, on Blackwell to 128 and 256, got {dims}"
    if blackwell and dims[0] == 256 and which == "backward" and lse_gradient:
        return "has no gradient of the log-sum-exp, which sinks need, at head dim 256; triton can"
    try:
        if device.capability:  # not on the machine that submits the job
            import_module("flash_attn.cute.interface")
    except Exception as error:  # its own, or of the compiler that it brings
        return f"needs flash-attn-4, by `pip install 'wlb-titan[fa4]'`: {error}"
    return None


def _refused_by_torch(
    which: str, dims: HeadDims, dtype: torch.dtype, device: Device, windowed: bool, lse_gradient: bool
) -> Reason:
    if device.type != "cuda" or device.hip:  # whose kernels give the log-sum-exp another shape
        return "needs an NVIDIA GPU or a CPU"
    if dims[0] != dims[1]:
        return f"takes equal head dims of q and v, got {dims}"
    if lse_gradient and which == "backward":
        return "has no gradient of the log-sum-exp, which sinks need"
    return _refused_by_triton(which, dims, dtype, device)  # the same types and generations of GPUs


def _refused_by_torch_cpu(
    which: str, dims: HeadDims, dtype: torch.dtype, device: Device, windowed: bool, lse_gradient: bool
) -> Reason:
    plain = not (windowed or (lse_gradient and which == "backward")) and dims[0] == dims[1]
    if device.type == "cpu" and plain and dtype != torch.float64:
        return None
    return "needs a CPU, equal head dims, no window, no gradient of the log-sum-exp, and is not for float64"


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
    refuses: Callable[..., Reason]  # takes what `chosen` takes
    judge: str  # the implementation that self_check.py compares it with
    untimed_on: tuple[str, ...]  # the kinds of devices where "auto" takes it without a measurement
    repeats: bool = True  # whether gradients have the same bits again, whatever torch's settings


NVIDIA = ("Blackwell", "NVIDIA")
GPUS = ("Hopper", *NVIDIA, "AMD")
TABLE = {  # the fastest first
    "gluon": Implementation("gluon_launch", _refused_by_gluon, "triton", ()),
    "fa4": Implementation("fa4", _refused_by_fa4, "triton", ("Blackwell",), repeats=False),
    TORCH: Implementation("torch_varlen", _refused_by_torch, REFERENCE, NVIDIA, repeats=False),
    "torch_cpu": Implementation("torch_cpu", _refused_by_torch_cpu, REFERENCE, ("CPU",)),
    "triton": Implementation("triton_launch", _refused_by_triton, REFERENCE, (*GPUS, "interpreter")),
    REFERENCE: Implementation("reference", lambda *_: None, REFERENCE, ("CPU", "interpreter")),
}
IMPLEMENTATIONS = ("auto", *TABLE)  # what callers may ask for


@cache
def load(name: str) -> ModuleType:
    return import_module(f".{TABLE[name].module}", __package__)


@cache
def chosen(
    which: str, implementation: str, dims: HeadDims, dtype: torch.dtype, device: Device,
    windowed: bool = False, lse_gradient: bool = False,
) -> str:  # fmt: skip
    """What runs a pass, "forward" or "backward", with head dims D and Dv, with a window or not and, in the
    backward, with a gradient of the log-sum-exp or not, for a caller that asks for `implementation`. Raises
    ValueError, with the reason, if that cannot run it; what `torch` cannot, the next of the table does."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    names = [implementation]
    if implementation == "auto":
        measured = FASTEST.get(device.family, {}).get(dims)
        names = [measured[PASSES.index(which)]] if measured else []
    if implementation == "auto" or (implementation == TORCH and not device.hip):
        names += [name for name in TABLE if device.kind in TABLE[name].untimed_on]
    for name in names:
        reason = TABLE[name].refuses(which, dims, dtype, device, windowed, lse_gradient)
        if reason is None:
            return name
    raise ValueError(f"implementation {implementation!r} {reason}")


@cache
def units(device: torch.device) -> int:
    """Programs that run at a time: a GPU's multiprocessors. On a CPU the reference runs block after block."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
