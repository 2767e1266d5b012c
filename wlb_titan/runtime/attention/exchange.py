"""The halves of context-parallel strategies that move tensors.

All-gather (`context/all_gather.py`): the rows of k and v that other ranks need go from Shard to Replicate and
into document order, and this rank's queries attend to them and to its own. Ulysses (`context/ulysses.py`):
heads go to the ranks whose share they are, and the outputs come back. docs/context_parallel.md has both.

Shape suffixes: L tokens of this rank, N heads, H head dim, R rows that this rank sends, W of k and v side by
side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from wlb_titan.context.all_gather import AllGather, KeyExchange
from wlb_titan.context.ulysses import Ulysses, head_shares
from wlb_titan.runtime.attention.module import Attend, Attended
from wlb_titan.runtime.compat import all_to_all_single_autograd


class AllGatherAttention:
    def __init__(self, config: AllGather.Config, *meshes: DeviceMesh) -> None:
        self._meshes = meshes

    def __call__(
        self,
        q_LNH: torch.Tensor,
        k_LNH: torch.Tensor,
        v_LNH: torch.Tensor,
        exchange: KeyExchange,
        attend: Attend,
        *,
        wants_lse: bool,
    ) -> Attended:
        """Keys and values travel side by side in one tensor, tokens first, so that a rank receives one piece;
        all levels are under way together. Attention sees views of one tensor."""
        tokens_LW = torch.cat([k_LNH.flatten(1), v_LNH.flatten(1)], dim=1)
        keys_KW = self._gathered(tokens_LW, exchange)
        k, v = keys_KW.split([x.shape[1] * x.shape[2] for x in (k_LNH, v_LNH)], dim=1)
        return attend(q_LNH, k.unflatten(1, k_LNH.shape[1:]), v.unflatten(1, v_LNH.shape[1:]))

    def _gathered(self, tokens_LW: torch.Tensor, exchange: KeyExchange) -> torch.Tensor:
        """Rows of the documents that this rank attends to, in the order of the mask's keys; the gradients of
        gathered rows are summed over the ranks."""
        levels = zip(exchange.levels, self._meshes, strict=True)
        under_way, sizes, begin = [], [], 0
        for (order, sent), mesh in reversed(list(levels)):  # the widest level's tokens come first
            if not len(order):
                continue
            rows = len(order) // mesh.size()
            first = torch.sym_min(begin, len(tokens_LW) - rows)
            with torch.no_grad():
                rows_RW = DTensor.from_local(
                    tokens_LW[first : first + rows], mesh, (Shard(0),), run_check=False
                )
                gathered = rows_RW.redistribute(mesh, (Replicate(),), async_op=True).to_local()
            under_way.append((gathered, order, mesh, begin - first))
            sizes.append(sent)
            begin += sent
        *parts, own = tokens_LW.split([*sizes, len(tokens_LW) - begin])
        # Each level's gathered rows are free once they are in order.
        keys = [_InDocumentOrder.apply(part, *under_way.pop(0)) for part in parts]
        if exchange.kept:
            keys.append(own)
        return keys[0] if len(keys) == 1 else torch.cat(keys)


class _InDocumentOrder(torch.autograd.Function):
    """The gathered rows reordered, as a function of this rank's part of them; backward from Partial to Shard.

    The rank sends `offset` rows before the part besides. The order, as of `Level`, is a permutation: the
    gradient is written row by row to its place, where autograd would add it to zeros with atomics.
    """

    @staticmethod
    def forward(
        ctx: Any,
        part: torch.Tensor,
        gathered: torch.Tensor,
        order: torch.Tensor,
        mesh: DeviceMesh,
        offset: int,
    ) -> torch.Tensor:
        ctx.mesh, ctx.rows = mesh, slice(offset, offset + len(part))
        ctx.save_for_backward(order)
        return gathered.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (order,) = ctx.saved_tensors
        by_rank = torch.empty_like(grad, memory_format=torch.contiguous_format)
        by_rank.index_copy_(0, order, grad)
        rows = DTensor.from_local(by_rank, ctx.mesh, (Partial(),), run_check=False)
        # Whoever uses the result waits for it: the gradients of all levels travel together.
        own = rows.redistribute(ctx.mesh, (Shard(0),), async_op=True).to_local()
        return own[ctx.rows], None, None, None, None


class UlyssesAttention:
    def __init__(self, config: Ulysses.Config, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __call__(
        self,
        q_LNH: torch.Tensor,
        k_LNH: torch.Tensor,
        v_LNH: torch.Tensor,
        exchange: tuple[()],
        attend: Attend,
        *,
        wants_lse: bool,
    ) -> Attended:
        shares = head_shares(q_LNH.shape[1], k_LNH.shape[1], self._mesh.size())
        mine = shares[self._mesh.get_local_rank()]
        queries = [share.query_heads for share in shares]
        shapes = [
            (mine.query_heads, q_LNH.shape[2]),
            (mine.key_heads, k_LNH.shape[2]),
            (mine.key_heads, v_LNH.shape[2]),
        ]
        widths = [heads * dim for heads, dim in shapes]
        heads = [(q_LNH[:, s.queries], k_LNH[:, s.keys], v_LNH[:, s.keys]) for s in shares]
        sent = [torch.cat([x.flatten(1) for x in own], dim=1) for own in heads]
        rows = torch.cat(self._exchanged(sent, [sum(widths)] * len(shares)))
        parts = rows.split(widths, dim=1)
        q, k, v = (part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))
        out, lse = attend(q, k, v)
        back = self._exchanged(out.flatten(1).chunk(len(shares)), [n * v.shape[2] for n in queries])
        output = torch.cat(back, dim=1).unflatten(1, (q_LNH.shape[1], v.shape[2]))
        if wants_lse:
            lse = torch.cat(self._exchanged(lse.T.chunk(len(shares)), queries), dim=1).T
        return output, lse

    def _exchanged(self, sent: Sequence[torch.Tensor], widths: Sequence[int]) -> list[torch.Tensor]:
        """One all-to-all of (L, W) to each rank, where W may differ; `widths` are those received."""
        tokens = len(sent[0])
        received = all_to_all_single_autograd(
            torch.cat([part.flatten() for part in sent]),
            [tokens * width for width in widths],
            [part.numel() for part in sent],
            self._mesh.get_group(),
        )
        parts = received.split([tokens * width for width in widths])
        return [part.view(tokens, width) for part, width in zip(parts, widths, strict=True)]
