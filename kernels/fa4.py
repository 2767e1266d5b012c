"""FlashAttention-4 (the package flash-attn-4) over segments, on Hopper and Blackwell GPUs.

Called below its own autograd, it takes the gradient of the log-sum-exp and the longest lengths, which torch's
`activate_flash_attention_impl("FA4")` does not pass on. Gradients are added up in any order, unless
torch.use_deterministic_algorithms asks for one that repeats.

It compiles other kernels where a call fits in a tile or two, and for many sequences. What it is told never
fits, and empty sequences make them many: no micro-batch waits for the compiler in training.
"""

from threading import Lock

import torch
from torch import Tensor
from torch.nn.functional import pad

from .schedule import Schedule
from .segments import NO_WINDOW, Options, Saved, Shape, aligned
from .tiles import Cut
from .torch_varlen import given, summed

LONG = 257  # tokens, more than two tiles have
MANY = 257  # sequences, from which on kernels look up that of a tile
ORDERS = ("any order", "fixed order")
_compiler = Lock()  # a single object with the state of what it compiles; warm_up has threads


def forward(q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, options: Options) -> tuple[Tensor, Tensor]:
    """Output (Tq, Nq, Dv) like q, and log-sum-exp (Nq, Tq) float32, +inf where a query sees no key."""
    from flash_attn.cute.interface import _flash_attn_fwd

    tensors, how = _by_name(q, k, v, schedule, options)
    with _compiler:
        out, lse, *_ = _flash_attn_fwd(*tensors, **how, return_lse=True)
    return out, lse.masked_fill_(lse == -torch.inf, torch.inf)


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, schedule: Schedule, options: Options, order: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, added up in one of ORDERS, by default as torch's setting says."""
    from flash_attn.cute.interface import _flash_attn_bwd

    order = order or ORDERS[torch.are_deterministic_algorithms_enabled()]
    tensors, how = _by_name(*saved[:3], schedule, options)
    how |= {"dlse": None if dlse is None else dlse.contiguous(), "deterministic": order == ORDERS[1]}
    with _compiler:
        gradients = _flash_attn_bwd(*tensors, aligned(saved.out), aligned(dout), saved.lse, **how)
    return summed(gradients, saved, schedule)


def divisions(*_: int) -> tuple[str, ...]:
    """Both orders: the check at a job's start changes torch's setting."""
    return ORDERS


def cuts(shape: Shape, device: torch.device) -> tuple[Cut, Cut]:
    """Blackwell's: two tiles of queries side by side; tiles of keys, and blocks of queries."""
    return Cut("queries", 256, 128), Cut("keys", 128, 128)


def _by_name(q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, options: Options) -> tuple[list, dict]:
    """Tensors, and what both passes are told of them."""
    tensors, (ends_q, ends_k, most_q, most_k, *_), _ = given(q, k, v, schedule, options)
    empty = 0, max(0, MANY + 1 - len(ends_q))
    return tensors, {
        "cu_seqlens_q": pad(ends_q, empty, value=len(q)),
        "cu_seqlens_k": pad(ends_k, empty, value=len(tensors[1])),
        "max_seqlen_q": max(most_q, LONG),
        "max_seqlen_k": max(most_k, LONG),
        "softmax_scale": options.scale,
        "causal": True,  # aligned at the end, as segments are
        "window_size_left": None if options.reach == NO_WINDOW else options.reach - 1,
    }
