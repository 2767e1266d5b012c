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
        all levels and groups of heads are under way together. Attention sees views of one tensor.

        One group attends while the next ones' keys travel. Autograd takes the last group first: its keys'
        gradients travel while the attention of the one before is differentiated."""
        heads = list(zip(*(x.chunk(attend.groups, dim=1) for x in (q_LNH, k_LNH, v_LNH)), strict=True))
        sent = [self._sent(torch.cat([k.flatten(1), v.flatten(1)], dim=1), exchange) for _, k, v in heads]
        attended: list[Attended] = []
        for group, (q, k, v) in enumerate(heads):
            after = None if len(heads) == 1 else attended[-1][0] if attended else q
            rows_KW = _in_order(*sent.pop(0), after)
            keys, values = rows_KW.split([k.shape[1] * k.shape[2], v.shape[1] * v.shape[2]], dim=1)
            keys, values = keys.unflatten(1, k.shape[1:]), values.unflatten(1, v.shape[1:])
            attended.append(attend(q, keys, values, group))
        if len(heads) == 1:
            return attended[0]
        outputs, lses = zip(*attended, strict=True)
        return torch.cat(outputs, dim=1), torch.cat(lses) if wants_lse else lses[0]

    def _sent(self, tokens_LW: torch.Tensor, exchange: KeyExchange) -> tuple[list[Any], list[torch.Tensor]]:
        """What `_in_order` takes, with the rows that other ranks need under way."""
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
        under_way = [(part, *one) for part, one in zip(parts, under_way, strict=True)]
        return under_way, [own] if exchange.kept else []


def _in_order(under_way: list[Any], own: list[torch.Tensor], after: torch.Tensor | None) -> torch.Tensor:
    """Rows of the documents that this rank attends to, in the order of the mask's keys; the gradients of
    gathered rows are summed over the ranks."""
    # Each level's gathered rows are free once they are in order.
    keys = [_InDocumentOrder.apply(*under_way.pop(0), after) for _ in range(len(under_way))] + own
    return keys[0] if len(keys) == 1 else torch.cat(keys)


def _rows_in_order(gathered: torch.Tensor, order: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return gathered.index_select(0, order)


def _rows_by_rank(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    by_rank = torch.empty_like(rows, memory_format=torch.contiguous_format)
    return by_rank.index_copy_(0, order, rows)


# As ops of their own, which compiled code fuses with no other group's: one kernel for the keys of two groups
# would wait for both. `after` is what the rank computes first.
_library = torch.library.Library("wlb_titan", "FRAGMENT")
for _op, _tensors, _rows in (
    ("rows_in_order", "Tensor gathered, Tensor order, Tensor after", _rows_in_order),
    ("rows_by_rank", "Tensor rows, Tensor order", _rows_by_rank),
):
    _library.define(f"{_op}({_tensors}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_op, _rows, "CompositeExplicitAutograd")
    torch.library.register_fake(f"wlb_titan::{_op}", _rows, lib=_library)


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
        after: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.mesh, ctx.rows, ctx.alone = mesh, slice(offset, offset + len(part)), after is None
        ctx.save_for_backward(order)
        if after is None:
            return gathered.index_select(0, order)
        return torch.ops.wlb_titan.rows_in_order.default(gathered, order, after)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        by_rank = (_rows_by_rank if ctx.alone else torch.ops.wlb_titan.rows_by_rank.default)(grad, order)
        rows = DTensor.from_local(by_rank, ctx.mesh, (Partial(),), run_check=False)
        # Whoever uses the result waits for it: the gradients of all levels travel together.
        own = rows.redistribute(ctx.mesh, (Shard(0),), async_op=True).to_local()
        return own[ctx.rows], None, None, None, None, None


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
