"""Launch of the automatically warp-specialized forward. Head dims 64 and 128, Hopper."""

import contextvars

import torch
import triton
from torch import Tensor

from .schedule import Schedule
from .specialized_forward import specialized_forward_kernel
from .triton_launch import LOG2_E, aligned, operand, section

HEAD_DIMS = (64, 128)
STAGES = {64: 3, 128: 2}


def forward(q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, scale: float) -> tuple[Tensor, Tensor]:
    """Output (Tq, Nq, Dv) and log-sum-exp (Nq, Tq) float32."""
    (q_tokens, q_heads, dim), (kv_tokens, kv_heads, v_dim) = q.shape, v.shape
    if dim not in HEAD_DIMS or v_dim not in HEAD_DIMS:
        raise ValueError(
            f"the warp-specialized kernel has head dims {HEAD_DIMS}, got {dim} for q, {v_dim} for v"
        )
    if q_tokens == 0 or kv_tokens == 0:
        return q.new_zeros(q_tokens, q_heads, v_dim), q.new_full((q_heads, q_tokens), torch.inf).float()
    q, k, v = (aligned(x) for x in (q, k, v))
    out = q.new_empty(q_tokens, q_heads, v_dim)
    lse = q.new_empty(q_heads, q_tokens, dtype=torch.float32)
    tiles = schedule.query_tiles(128, merge=False)

    def launch() -> None:
        # Room for the descriptors that programs make. Triton keeps the allocator in a context variable, so
        # setting it within a copy of the context leaves everyone else's alone.
        triton.set_allocator(lambda size, alignment, stream: q.new_empty(size, dtype=torch.int8))
        specialized_forward_kernel[(len(tiles) * q_heads,)](
            q,
            operand(k, 128, 1, True),
            operand(v, 128, 1, True),
            out,
            lse,
            tiles,
            len(tiles),
            q_tokens,
            q_heads,
            scale * LOG2_E,
            q.stride(0),
            *out.stride()[:2],
            D=dim,
            DV=v_dim,
            BLOCK_M=128,
            BLOCK_N=128,
            GROUP=q_heads // kv_heads,
            SECTION=section(k, v, q_heads // kv_heads),
            num_warps=4,
            num_stages=STAGES[max(dim, v_dim)],
            enable_fp_fusion=True,
        )

    contextvars.copy_context().run(launch)
    return out, lse
