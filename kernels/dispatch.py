"""Runs a call of the op: the reference or one of the kernels, as `implementations.py` chooses."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from . import reference
from .implementations import chosen, device_of
from .options import Options, Saved
from .segments import check_segments


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (Nq, Tq), for tensors that segments.check_tensors has accepted.

    Raises ValueError for an implementation that cannot run them and for segments that cannot be attended (for
    the kernels, once for each schedule).
    """
    implementation = _chosen(q, v, options)
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

        return triton_launch.forward(q, k, v, schedule, options, tma=device_of(q.device).tma)


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, segments: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for those of the output and, unless None, of the log-sum-exp."""
    q, k, v, _, _ = saved
    implementation = _chosen(q, v, options)
    if implementation == "reference":
        return reference.backward(dout, dlse, saved, segments, options)
    from .schedule import schedule_of

    with current(q.device):
        schedule = schedule_of(segments, q.shape[0], k.shape[0], q.device, options.visibility)
        if implementation == "gluon":
            from . import gluon_launch

            return gluon_launch.backward(dout, dlse, saved, schedule, options)
        from . import triton_launch

        return triton_launch.backward(dout, dlse, saved, schedule, options, tma=device_of(q.device).tma)


def _chosen(q: Tensor, v: Tensor, options: Options) -> str:
    return chosen(options.implementation, (q.shape[2], v.shape[2]), q.dtype, device_of(q.device))


def current(device: torch.device) -> AbstractContextManager:
    """Makes a GPU the current one: Triton launches on that, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
