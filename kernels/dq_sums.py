"""The sums of dQ of the Gluon backward: float32, in an order of their own, and the kernel that ends them.

Each thread of a consumer finds its values side by side only in this order, and so hands a step's dQ to the
copy engine by stores of 16 bytes that meet in no bank of shared memory. Of 64 rows, 64 / pack tokens with
`pack` heads of each, the sums are
(half of D, 8 columns, warp, row of 8, lane of 4, row // 8 of the warp's 16, 2 columns).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # of a block
WIDTH = 128  # of a row of the sums


def no_sums(q: Tensor, pack: int, edges: Tensor) -> Tensor:
    """For the blocks of 64 rows of q (Tq, Nq, D), in this order: (n, WIDTH) float32, zero in `edges` only.

    edges: (e,) int64, blocks of 64 / pack tokens.
    """
    tokens, heads, dim = q.shape
    blocks = triton.cdiv(tokens, ROWS // pack)
    shape = blocks * (heads // pack) * ROWS * dim // WIDTH, WIDTH
    sums = q.new_empty(shape, dtype=torch.float32)
    sums.view(blocks, -1).index_fill_(0, edges, 0)
    return sums


def gradient(sums: Tensor, q: Tensor, bounds: Tensor, pack: int, scale: float) -> Tensor:
    """dQ (Tq, Nq, D) of its sums, scaled, in the dtype of q.

    bounds: (2, Tq) int32 of `tiles.row_bounds`; rows without keys are zero, whatever their sums.
    """
    tokens, heads, dim = q.shape
    dq = q.new_empty(q.shape)
    dq_kernel[(triton.cdiv(tokens, ROWS // pack), heads // pack)](
        sums=sums,
        dq=dq,
        bounds=bounds,
        tokens=tokens,
        heads=heads,
        scale=scale,
        D=dim,
        PACK=pack,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return dq


@triton.jit(do_not_specialize=["tokens"])
def dq_kernel(sums, dq, bounds, tokens, heads, scale, D: tl.constexpr, PACK: tl.constexpr):
    """One block of 64 rows: so many tokens, and PACK heads."""
    block = tl.program_id(0).to(tl.int64) * (heads // PACK) + tl.program_id(1)
    values = tl.load(sums + block * (64 * D) + tl.arange(0, 64 * D))
    values = tl.reshape(values, (2, D // 16, 4, 8, 4, 2, 2))
    values = tl.reshape(tl.permute(values, (2, 5, 3, 0, 1, 4, 6)), (64, D)) * scale
    row = tl.arange(0, 64)
    token = tl.program_id(0) * (64 // PACK) + row // PACK
    head = tl.program_id(1) * PACK + row % PACK
    first = tl.load(bounds + token, mask=token < tokens, other=0)
    last = tl.load(bounds + tokens + token, mask=token < tokens, other=0)
    values = tl.where((first < last)[:, None], values, 0.0)
    at = (token.to(tl.int64) * heads + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dq + at, values.to(dq.dtype.element_ty), mask=(token < tokens)[:, None])
