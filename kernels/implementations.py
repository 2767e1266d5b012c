"""What computes a call of the op, by a rule on pass, head dims, dtype and device; and the call.

| implementation | forward                         | backward                     | needs              |
|----------------|---------------------------------|------------------------------|--------------------|
| reference      | plain PyTorch                   | plain PyTorch                | nothing            |
| triton         | Triton                          | Triton: dK and dV, then dQ   | sm_80 or later     |
| gluon          | Gluon, FlashAttention-3's order | Gluon: all three in one pass | sm_90, D 64 or 128 |

"auto" takes what was measured fastest: on Hopper with head dim 128 Gluon, which took less time than Triton in
all cases timed on an H100, forward and backward; other head dims were not timed, so Triton. Gluon's backward
only where a record says that it passed its trial (record.py), because its warps meet in ways that only such a
GPU can show to be right; elsewhere Triton's, which needs the same of a forward. On the CPU the reference;
under Triton's interpreter (TRITON_INTERPRET=1) Triton for float16 and float32, as that computes bfloat16
wrongly.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import record, reference
from .options import Options, Saved
from .segments import check_segments

IMPLEMENTATIONS = ("auto", "reference", "triton", "gluon")
MAX_HEAD_DIM = 256
GLUON_HEAD_DIMS = (64, 128)
MEASURED_FASTEST = (128, 128)  # D and Dv for which Gluon was
TOLERANCE = 0.02  # between two gradients, norm over norm; rounding to bfloat16 leaves 0.004


class Device(NamedTuple):
    """What the rule has to know of a device.

    type: as of torch.device. capability: of a GPU, None where it is not known yet, which excludes nothing.
    interpreted: whether Triton is there and runs its kernels on the CPU, for tests. passed: head dims, D and
    Dv, and dtypes for which Gluon's backward has passed its trial there.
    """

    type: str
    capability: tuple[int, int] | None = None
    interpreted: bool = False
    passed: frozenset[tuple[tuple[int, int], torch.dtype]] = frozenset()

    @property
    def tma(self) -> bool:
        """Whether to load by TMA: on Hopper, and in the interpreter, which emulates it."""
        return self.type != "cuda" or (self.capability is not None and self.capability[0] == 9)


@cache
def device_of(device: torch.device) -> Device:
    """The facts of a device that is there; asked for once, and again after `device_of.cache_clear()`."""
    if device.type == "cuda":
        found = Device("cuda", torch.cuda.get_device_capability(device))
        return found._replace(passed=record.passed(device, MEASURED_FASTEST)) if found.tma else found
    return Device(device.type, interpreted=_interpreting())


@cache
def chosen(which: str, implementation: str, dims: tuple[int, int], dtype: torch.dtype, device: Device) -> str:
    """What runs a pass, "forward" or "backward", where a caller asks for `implementation`.

    dims: D of queries and keys, and Dv of values.

    Raises ValueError, with the reason, if it cannot run such tensors.
    """
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


def forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor, options: Options, **how: Any
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (Nq, Tq), for tensors that segments.check_tensors has accepted.

    how: keywords of gluon_launch.forward, where that runs.

    Raises ValueError for an implementation that cannot run them and for segments that cannot be attended (for
    the kernels, once for each schedule).
    """
    implementation = _chosen("forward", q, v, options)
    if implementation == "reference":
        check_segments(segments.numpy(), q.shape[0], k.shape[0], options.visibility.causal)
        return reference.forward(q, k, v, segments, options)
    from .schedule import schedule_of  # only here: Triton may be absent

    with current(q.device):
        schedule = schedule_of(segments, q.shape[0], k.shape[0], q.device, options.visibility)
        if implementation == "gluon":
            from . import gluon_launch

            return gluon_launch.forward(q, k, v, schedule, options, **how)
        from . import triton_launch

        return triton_launch.forward(q, k, v, schedule, options, tma=device_of(q.device).tma)


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, segments: Tensor, options: Options, **how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for those of the output and, unless None, of the log-sum-exp.

    how: keywords of gluon_launch.backward, where that runs.
    """
    q, k, v, _, _ = saved
    implementation = _chosen("backward", q, v, options)
    if implementation == "reference":
        return reference.backward(dout, dlse, saved, segments, options)
    from .schedule import schedule_of

    with current(q.device):
        schedule = schedule_of(segments, q.shape[0], k.shape[0], q.device, options.visibility)
        from . import triton_launch

        tma = device_of(q.device).tma
        by_triton = partial(triton_launch.backward, dout, dlse, saved, schedule, options, tma=tma)
        if implementation == "triton":
            return by_triton()
        from . import gluon_launch

        return comparison.compare(
            gluon_launch.backward(dout, dlse, saved, schedule, options, **how), by_triton
        )


def _chosen(which: str, q: Tensor, v: Tensor, options: Options) -> str:
    dims = q.shape[2], v.shape[2]
    return chosen(which, options.implementation, dims, q.dtype, device_of(q.device))


def current(device: torch.device) -> AbstractContextManager:
    """Makes a GPU the current one: Triton launches on that, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


Gradients = tuple[Tensor, Tensor, Tensor]


class Comparison:
    """Gluon's backward beside Triton's within a run, on its own data and sizes, which no check knows before.

    One backward pass, the next of any layer, is computed by both when it is asked for; the run goes on with
    Gluon's. It finds what is wrong each time, not a rare race. A process has one, as passes run in autograd's
    threads.
    """

    def __init__(self) -> None:
        self._asked = False
        self._difference: Tensor | None = None

    def ask(self) -> None:
        """Compare the next backward pass."""
        self._asked, self._difference = True, None

    def compare(self, got: Gradients, judge: Callable[[], Gradients]) -> Gradients:
        """`got`; compared with the judge's, where that was asked for."""
        if self._asked:
            self._asked = False
            with suppress(torch.OutOfMemoryError):  # of what a run may do without
                each = [_norm(a - b) / _norm(b).clamp(min=1e-30) for a, b in zip(got, judge(), strict=True)]
                self._difference = torch.stack(each).max()
        return got

    def answer(self) -> float | None:
        """The largest difference of a gradient; None where Gluon ran no pass, or there was no room.

        Waits for the device.
        """
        self._asked = False
        return None if self._difference is None else float(self._difference)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))


comparison = Comparison()
