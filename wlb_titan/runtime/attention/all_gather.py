"""The half of all-gather context parallelism that moves tensors (see `context/all_gather.py`).

q stays as it is; of k and v, sharded over the cp mesh axis, the rows that others need go from Shard to
Replicate together (one all-gather; one reduce-scatter of their gradients on the way back), within groups of
neighbours or over the whole axis. They are brought from the ranks' order into document order, and this rank's
queries attend to them and to its own.

In several groups of heads, the gathers of all groups are started first, and each group attends as soon as its
own keys have come; on the way back a group's gradients travel while the one before it computes its own. This
rests on the order in which autograd runs: what was computed last first.

Shape suffixes: L tokens of this rank, N heads, H head dim, R rows that this rank sends, W of k and v side by
side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from wlb_titan.context.all_gather import AllGather
from wlb_titan.runtime.attention.module import Attend, Attended


class AllGatherAttention:
    """This rank's queries, and the keys of their documents."""

    def __init__(self, config: AllGather.Config, *meshes: DeviceMesh) -> None:
        self._groups, self._meshes = config.gather_groups, meshes

    def __call__(
        self,
        q_LNH: torch.Tensor,
        k_LNH: torch.Tensor,
        v_LNH: torch.Tensor,
        exchange: tuple[torch.Tensor, ...],
        attend: Attend,
        *,
        wants_lse: bool,
    ) -> Attended:
        """As `ContextAttention` says; `exchange` as of `context.all_gather.gathered_mask`."""
        chunks = (x.chunk(self._groups, dim=1) for x in (q_LNH, k_LNH, v_LNH))
        groups = [(q, Gather(k, v, exchange, self._meshes)) for q, k, v in zip(*chunks, strict=True)]
        outputs, lses = zip(*(attend(q, *gather.finish()) for q, gather in groups), strict=True)
        return torch.cat(outputs, dim=1), torch.cat(lses) if wants_lse else lses[0]


class Gather:
    """The keys and values that other ranks need, under way from the moment this is made.

    They travel side by side in one tensor, tokens first, so that what a rank receives lies in one piece.

    Args:
        k_LNH, v_LNH: this rank's L tokens; N and H may differ between them.
        exchange: as of `context.all_gather.gathered_mask`.
    """

    def __init__(
        self,
        k_LNH: torch.Tensor,
        v_LNH: torch.Tensor,
        exchange: Sequence[torch.Tensor],
        meshes: Sequence[DeviceMesh],
    ) -> None:
        self._shapes = [x.shape[1:] for x in (k_LNH, v_LNH)]
        *levels, own = exchange
        mine_LW = torch.cat([k_LNH.flatten(1), v_LNH.flatten(1)], dim=1)
        tokens, begin = len(mine_LW), 0
        self._sent: list[_Sent] = []
        sizes = []
        # The widest level's tokens come first.
        for order, sent, mesh in reversed(list(zip(levels[::2], levels[1::2], meshes, strict=True))):
            if not len(order):
                continue
            count, rows = len(sent), len(order) // mesh.size()
            first = torch.sym_min(begin, tokens - rows)
            with torch.no_grad():
                rows_RW = DTensor.from_local(
                    mine_LW[first : first + rows], mesh, (Shard(0),), run_check=False
                )
                gathered = rows_RW.redistribute(mesh, (Replicate(),), async_op=True).to_local()
            self._sent.append(_Sent(gathered, order, mesh, begin - first))
            sizes.append(count)
            begin += count
        self._parts = mine_LW.split([*sizes, tokens - begin])
        self._keeps = len(own) > 0

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Waits for them.

        Returns:
            k and v of the documents that this rank attends to, in the order of the mask's keys, views of one
            tensor in which the heads of both lie side by side. Gradients of what was gathered are summed over
            the ranks.
        """
        # Each level's gathered rows are free once they are in order.
        keys = [_InDocumentOrder.apply(part, *self._sent.pop(0)) for part in self._parts[: len(self._sent)]]
        if self._keeps:
            keys.append(self._parts[-1])
        together = keys[0] if len(keys) == 1 else torch.cat(keys)
        k, v = together.split([shape.numel() for shape in self._shapes], dim=1)
        return k.unflatten(1, self._shapes[0]), v.unflatten(1, self._shapes[1])


class _Sent(NamedTuple):
    """What travels on one level.

    Attributes:
        gathered: rows of all ranks of the group, R each.
        order: int64 (R x ranks,), where each key in document order lies among them.
        mesh: the group.
        offset: rows before this rank's own part that it sends besides.
    """

    gathered: torch.Tensor
    order: torch.Tensor
    mesh: DeviceMesh
    offset: int


class _InDocumentOrder(torch.autograd.Function):
    """The gathered rows reordered, as a function of this rank's part of them; backward from Partial to Shard.

    One function for the reordering and the gradient of the gather, because the order is a permutation: the
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
        # Whoever uses the result waits for it, which lets the group before this one compute meanwhile.
        own = rows.redistribute(ctx.mesh, (Shard(0),), async_op=True).to_local()
        return own[ctx.rows], None, None, None, None
