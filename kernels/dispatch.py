"""What runs a call: the reference or one of the kernels, by device, capability and the caller's wish.

| implementation | forward                         | backward                     | needs              |
|----------------|---------------------------------|------------------------------|--------------------|
| reference      | plain PyTorch                   | plain PyTorch                | nothing            |
| triton         | Triton                          | Triton: dK and dV, then dQ   | sm_80 or later     |
| gluon          | Gluon, FlashAttention-3's order | Gluon: all three in one pass | sm_90, D 64 or 128 |

"auto" is the reference on the CPU and triton on CUDA. The Gluon kernels have run on an emulator and through
the compiler, but not yet on a GPU, so nothing chooses them by itself: see docs/kernels.md. Under Triton's
interpreter (TRITON_INTERPRET=1), "auto" runs the Triton kernels on CPU tensors of float16 and float32; it
computes bfloat16 wrongly, so bfloat16 goes to the reference.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from . import reference
from .options import Options, Saved
from .segments import check_segments

IMPLEMENTATIONS = ("auto", "reference", "triton", "gluon")
MAX_HEAD_DIM = 256
GLUON_HEAD_DIMS = (64, 128)


def forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor, options: Options, implementation: str
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (Nq, Tq), for tensors that segments.check_tensors has accepted.

    Raises ValueError for segments that cannot be attended (for the kernels, once for each schedule).
    """
    implementation = resolve(q, v, implementation)
    if implementation == "reference":
        check_segments(segments.numpy(), q.shape[0], k.shape[0], options.visibility.causal)
        return reference.forward(q, k, v, segments, options)
    from .schedule import schedule_of  # only here: Triton may be absent

    with current(q.device):
        schedule = schedule_of(segments, q.shape[0], k.shape[0], q.device, options.visibility)
        if implementation == "gluon":
            from . import gluon_launch

            return gluon_launch.forward(q, k, v, schedule, options)
        from . import triton_launch

        return triton_launch.forward(q, k, v, schedule, options, tma=has_tma(q))


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, segments: Tensor, options: Options, implementation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for those of the output and, unless None, of the log-sum-exp."""
    q, k, v, _, _ = saved
    implementation = resolve(q, v, implementation)
    if implementation == "reference":
        return reference.backward(dout, dlse, saved, segments, options)
    from .schedule import schedule_of

    with current(q.device):
        schedule = schedule_of(segments, q.shape[0], k.shape[0], q.device, options.visibility)
        if implementation == "gluon":
            from . import gluon_launch

            return gluon_launch.backward(dout, dlse, saved, schedule, options)
        from . import triton_launch

        return triton_launch.backward(dout, dlse, saved, schedule, options, tma=has_tma(q))


def current(device: torch.device) -> AbstractContextManager:
    """Makes a GPU the current one: Triton launches on that, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def resolve(q: Tensor, v: Tensor, implementation: str) -> str:
    """The implementation to run; ValueError, with the reason, if it cannot run these tensors."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is none of {', '.join(IMPLEMENTATIONS)}")
    interpreted = not q.is_cuda and interpreting()
    if implementation == "auto":
        interpretable = interpreted and q.dtype in (torch.float16, torch.float32)
        implementation = "triton" if q.is_cuda or interpretable else "reference"
    if implementation == "reference":
        return implementation

    if not q.is_cuda and not interpreted:
        raise ValueError(f"implementation {implementation!r} needs CUDA tensors, got tensors on {q.device}")
    dtypes = (torch.float16, torch.float32) if interpreted else (torch.float16, torch.bfloat16)
    if q.dtype not in dtypes:
        raise ValueError(
            f"implementation {implementation!r} takes {dtypes[0]} and {dtypes[1]} here, got {q.dtype}"
        )
    for name, dim in (("q", q.shape[2]), ("v", v.shape[2])):
        if dim > MAX_HEAD_DIM or dim % 8 != 0 or dim == 0:
            raise ValueError(f"head dims are multiples of 8 up to {MAX_HEAD_DIM}, but {name} has {dim}")
    if implementation == "gluon":
        if interpreted or not has_tma(q):
            raise ValueError(
                f"implementation {implementation!r} needs a GPU of compute capability 9 (Hopper)"
            )
        for name, dim in (("q", q.shape[2]), ("v", v.shape[2])):
            if dim not in GLUON_HEAD_DIMS:
                raise ValueError(f"the Gluon kernels have head dims {GLUON_HEAD_DIMS}, but {name} has {dim}")
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0):
        raise ValueError(f"the kernels need compute capability 8.0 or later, {q.device} has less")
    return implementation


def interpreting() -> bool:
    """Whether Triton is there and runs its kernels on the CPU, for tests."""
    try:
        from triton import knobs
    except ImportError:
        return False
    return knobs.runtime.interpret


def has_tma(x: Tensor) -> bool:
    """Whether to load by TMA: on Hopper, and in the interpreter, which emulates it."""
    return not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] == 9
