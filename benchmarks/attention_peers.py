"""What the kernels are measured against on the same segments: PyTorch's attention, and FlashAttention-4."""

import importlib.util
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from attention_cases import Case
from torch import Tensor

Call = Callable[[], Tensor]


def has_fa4() -> bool:
    """Whether FlashAttention-4 (the package flash-attn-4, CuTe DSL) is installed."""
    return importlib.util.find_spec("flash_attn") is not None and bool(
        importlib.util.find_spec("flash_attn.cute")
    )


def varlen(case: Case, q: Tensor, k: Tensor, v: Tensor, *, repack: bool) -> Call:
    """torch.nn.attention.varlen.varlen_attn."""
    from torch.nn.attention.varlen import varlen_attn

    options = {"window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = q.shape[1] != k.shape[1]

    def attend(q, k, v, offsets, longest) -> Tensor:
        return varlen_attn(q, k, v, *offsets, *longest, **options)

    return _by_offsets(case, q, k, v, attend, repack)


def fa4(case: Case, q: Tensor, k: Tensor, v: Tensor, *, deterministic: bool, repack: bool) -> Call:
    """FlashAttention-4, with dQ summed in any order unless `deterministic`."""
    from flash_attn.cute import flash_attn_varlen_func

    def attend(q, k, v, offsets, longest) -> Tensor:
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=offsets[0],
            cu_seqlens_k=offsets[1],
            max_seqlen_q=longest[0],
            max_seqlen_k=longest[1],
            causal=True,
            deterministic=deterministic,
        )
        return out[0] if isinstance(out, tuple) else out

    return _by_offsets(case, q, k, v, attend, repack)


def _by_offsets(case: Case, q: Tensor, k: Tensor, v: Tensor, attend: Callable, repack: bool) -> Call:
    """A call of what takes cumulative lengths: its key ranges cannot overlap, nor leave gaps.

    repack: gather every segment's keys and values first, inside the timed call, as a shard needs. Without it
    the segments must be whole documents; a case that is not is gathered beforehand, outside the timed call.
    """
    q_len, kv_len = case.segments[:, 1], case.segments[:, 3]
    rows = torch.cat([torch.arange(s, s + n) for s, n in case.segments[:, 2:].tolist()]).to(q.device)
    offsets = [F.pad(n.cumsum(0), (1, 0)).to(q.device, torch.int32) for n in (q_len, kv_len)]
    longest = int(q_len.max()), int(kv_len.max())
    if not repack:
        k, v = (x.detach().index_select(0, rows).requires_grad_(x.requires_grad) for x in (k, v))

    def call() -> Tensor:
        keys, values = (x.index_select(0, rows) for x in (k, v)) if repack else (k, v)
        return attend(q, keys, values, offsets, longest)

    call.leaves = (q, k, v)
    return call


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Call:
    """cuDNN's dense causal attention: the ceiling, for one whole document only."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call() -> Tensor:
        heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(
                *heads_first, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out[0].transpose(0, 1)

    call.leaves = (q, k, v)
    return call
