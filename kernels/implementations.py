"""What computes a call of the op, by a rule on pass, head dims, dtype and device.

| implementation | forward                         | backward                     | needs              |
|----------------|---------------------------------|------------------------------|--------------------|
| reference      | plain PyTorch                   | plain PyTorch                | nothing            |
| triton         | Triton                          | Triton: dK and dV, then dQ   | sm_80 or later     |
| gluon          | Gluon, FlashAttention-3's order | Gluon: all three in one pass | sm_90, D 64 or 128 |

"auto" takes what was measured fastest:

- On Hopper with head dim 128 Gluon, which took less time than Triton in all cases timed on an H100, forward
  and backward. Its backward only where a record says that it passed its trial (record.py), because its warps
  meet in ways that only that GPU can show to be right; elsewhere Triton's, which takes the same forward.
- With other head dims, which were not timed, and on other GPUs Triton.
- On the CPU the reference; under Triton's interpreter (TRITON_INTERPRET=1), which computes bfloat16 wrongly,
  Triton for float16 and float32.
"""

from functools import cache
from typing import NamedTuple

import torch

from . import record

IMPLEMENTATIONS = ("auto", "reference", "triton", "gluon")
MAX_HEAD_DIM = 256
GLUON_HEAD_DIMS = (64, 128)
MEASURED_FASTEST = (128, 128)  # D and Dv for which Gluon was


class Device(NamedTuple):
    """What the rule needs to know about a device."""

    type: str  # as of torch.device
    capability: tuple[int, int] | None = None  # of a GPU; None, not known yet, excludes nothing
    interpreted: bool = False  # whether Triton is there and runs its kernels on the CPU, for tests
    passed: frozenset[tuple[tuple[int, int], torch.dtype]] = frozenset()  # D, Dv, dtype of passed trials

    @property
    def tma(self) -> bool:
        """Whether to load by TMA: on Hopper, and in the interpreter, which emulates it."""
        return self.type != "cuda" or (self.capability is not None and self.capability[0] == 9)


@cache
def device_of(device: torch.device) -> Device:
    """What the rule needs to know about a device; cached until `device_of.cache_clear()`."""
    if device.type == "cuda":
        found = Device("cuda", torch.cuda.get_device_capability(device))
        return found._replace(passed=record.passed(device, MEASURED_FASTEST)) if found.tma else found
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
        fastest = device.tma and dims == MEASURED_FASTEST
        return "gluon" if fastest and (which == "forward" or (dims, dtype) in device.passed) else "triton"
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
