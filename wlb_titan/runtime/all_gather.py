"""The half of all-gather context parallelism that moves tensors (see `context/all_gather.py`).

q stays as it is; k and v, sharded over the cp mesh axis, go from Shard to Replicate on it together (one
all-gather; one reduce-scatter of their gradients on the way back), are brought from the ranks' order into
document order, and this rank's queries attend to them.

In several groups of heads, the gathers of all groups are started first, and each group attends as soon as its
own keys have come; on the way back a group's gradients travel while the one before it computes its own. This
rests on the order in which autograd runs: what was computed last first.

Shape suffixes: L tokens of this rank, N heads, H head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from wlb_titan.context.all_gather import AllGather
from wlb_titan.runtime.attention import Attend, Attended


class AllGatherAttention:
    """This rank's queries and everybody's keys."""

    def __init__(self, config: AllGather.Config, mesh: DeviceMesh) -> None:
        self._groups = config.gather_groups
        self._mesh = mesh

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
        """As `ContextAttention` says; `exchange` is the order of the gathered keys, int64 (L x ranks,)."""
        (key_order,) = exchange
        chunks = (x.chunk(self._groups, dim=1) for x in (q_LNH, k_LNH, v_LNH))
        groups = [(q, Gather(k, v, self._mesh)) for q, k, v in zip(*chunks, strict=True)]
        outputs, lses = zip(*(attend(q, *gather.finish(key_order)) for q, gather in groups), strict=True)
        return torch.cat(outputs, dim=1), torch.cat(lses) if wants_lse else lses[0]


class Gather:
    """The keys and values of all context-parallel ranks, under way from the moment this is made.

    They travel side by side in one tensor, tokens first, so that what a rank receives lies in one piece: the
    permutation is the only copy.

    Args:
        k_LNH, v_LNH: this rank's L tokens; N and H may differ between them.
        mesh: the cp mesh axis.
    """

    def __init__(self, k_LNH: torch.Tensor, v_LNH: torch.Tensor, mesh: DeviceMesh) -> None:
        self._shapes = [x.shape[1:] for x in (k_LNH, v_LNH)]
        self._mesh = mesh
        self._mine = torch.cat([k_LNH.flatten(1), v_LNH.flatten(1)], dim=1)
        with torch.no_grad():
            rows = DTensor.from_local(self._mine, mesh, (Shard(0),), run_check=False)
            self._gathered = rows.redistribute(mesh, (Replicate(),), async_op=True).to_local()

    def finish(self, key_order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Waits for them and brings them into document order.

        Args:
            key_order: int64 (L x ranks,): position among the gathered keys of each key in document order.

        Returns:
            k and v with L x ranks tokens, views of one tensor in which the heads of both lie side by side.
            Their gradients are summed over the ranks.
        """
        ordered = _InDocumentOrder.apply(self._mine, self._gathered, key_order, self._mesh)
        k, v = ordered.split([shape.numel() for shape in self._shapes], dim=1)
        return k.unflatten(1, self._shapes[0]), v.unflatten(1, self._shapes[1])


class _InDocumentOrder(torch.autograd.Function):
    """The gathered rows reordered, as a function of this rank's rows; backward from Partial to Shard.

    One function for the reordering and the gradient of the gather, because `key_order` is a permutation: the
    gradient is written row by row to its place, where autograd would add it to zeros with atomics.
    """

    @staticmethod
    def forward(
        ctx: Any, mine: torch.Tensor, gathered: torch.Tensor, key_order: torch.Tensor, mesh: DeviceMesh
    ) -> torch.Tensor:
        ctx.mesh = mesh
        ctx.save_for_backward(key_order)
        return gathered.index_select(0, key_order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (key_order,) = ctx.saved_tensors
        by_rank = torch.empty_like(grad, memory_format=torch.contiguous_format)
        by_rank.index_copy_(0, key_order, grad)
        rows = DTensor.from_local(by_rank, ctx.mesh, (Partial(),), run_check=False)
        # Whoever uses the result waits for it, which lets the group before this one compute meanwhile.
        return rows.redistribute(ctx.mesh, (Shard(0),), async_op=True).to_local(), None, None, None
