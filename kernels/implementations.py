"""What computes a call of the op, by a rule on pass, head dims, dtype and device.

| implementation | forward                         | backward                     | needs              |
|----------------|---------------------------------|------------------------------|--------------------|
| reference      | plain PyTorch                   | plain PyTorch                | nothing            |
| triton         | Triton                          | Triton: dK and dV, then dQ   | sm_80 or later     |
| gluon          | Gluon, FlashAttention-3's order | Gluon: all three in one pass | sm_90, D 64 or 128 |

"auto" takes what was measured fastest (fastest.py); where nothing was measured, Triton on a GPU and the
reference on the CPU; under Triton's interpreter (TRITON_INTERPRET=1), which computes bfloat16 wrongly, Triton
for float16 and float32.
"""

from functools import cache
from typing import NamedTuple

import torch

from .fastest import FASTEST

PASSES = ("forward", "backward")
IMPLEMENTATIONS = ("auto", "reference", "triton", "gluon")
MAX_HEAD_DIM = 256
GLUON_HEAD_DIMS = (64, 128)


class Device(NamedTuple):
    """What the rule needs to know about a device."""

    type: str  # as of torch.device
    capability: tuple[int, int] | None = None  # of a GPU; None, not known yet, excludes nothing
    interpreted: bool = False  # whether Triton is there and runs its kernels on the CPU, for tests

    @property
    def tma(self) -> bool:
        """Whether to load by TMA: on Hopper, and in the interpreter, which emulates it."""
        return self.type != "cuda" or (self.capability is not None and self.capability[0] == 9)


@cache
def device_of(device: torch.device) -> Device:
    """What the rule needs to know about a device; cached until `device_of.cache_clear()`."""
    if device.type == "cuda":
        return Device("cuda", torch.cuda.get_device_capability(device))
    return Device(device.type, interpreted=_interpreting())


@cache
def chosen(which: str, implementation: str, dims: tuple[int, int], dtype: torch.dtype, device: Device) -> str:
    """What runs a pass, "forward" or "backward", with head dims D and Dv, for a caller that asks for
    `implementation`. Raises ValueError, with the reason, if that cannot run it."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is none of {', '.join(IMPLEMENTATIONS)}")
    on_gpu = device.type == "cuda"
    if implementation == "auto" and not on_gpu:
        interpretable = device.interpreted and dtype in (torch.float16, torch.float32)
        implementation = "triton" if interpretable else "reference"
    if implementation == "reference":
        return implementation

    if not on_gpu and not device.interpreted:
        raise ValueError(f"implementation {implementation!r} needs a CUDA device, and runs on {device.type}")
    dtypes = (torch.float16, torch.bfloat16) if on_gpu else (torch.float16, torch.float32)
    if dtype not in dtypes:
        raise ValueError(
            f"implementation {implementation!r} takes {dtypes[0]} and {dtypes[1]} here, got {dtype}"
        )
    for name, dim in zip("qv", dims, strict=True):
        if dim > MAX_HEAD_DIM or dim % 8 != 0 or dim == 0:
            raise ValueError(f"head dims are multiples of 8 up to {MAX_HEAD_DIM}, but {name} has {dim}")
    known = on_gpu and device.capability is not None
    if known and device.capability < (8, 0):
        raise ValueError(f"the kernels need compute capability 8.0 or later, got {device.capability}")
    if implementation == "gluon":
        if not (device.tma if known else on_gpu):
            raise ValueError("implementation 'gluon' needs a GPU of compute capability 9 (Hopper)")
        for name, dim in zip("qv", dims, strict=True):
            if dim not in GLUON_HEAD_DIMS:
                raise ValueError(f"the Gluon kernels have head dims {GLUON_HEAD_DIMS}, but {name} has {dim}")
    if implementation == "auto":
        family = FASTEST.get(device.capability[0], {}) if device.capability else {}
        return family.get(dims, ("triton", "triton"))[PASSES.index(which)]
    return implementation


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
