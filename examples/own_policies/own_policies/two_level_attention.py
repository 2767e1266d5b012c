"""The half of `two_level` that moves tensors."""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


class TwoLevelAttention:
    """This rank's queries and everybody's keys, which come in two steps."""

    def __init__(self, config, mesh):
        self._mesh = mesh
        self._groups = config.gather_groups

    def __call__(self, q, k, v, exchange, attend, *, wants_lse):
        """Tensors are (tokens, heads, head dim); `exchange` is what `AllGather.mask` gives."""
        outputs, lses = [], []
        for queries, *keys in zip(*(x.chunk(self._groups, dim=1) for x in (q, k, v)), strict=True):
            out, lse = attend(queries, *(self._keys(x, *exchange) for x in keys))
            outputs.append(out)
            lses.append(lse)
        return torch.cat(outputs, dim=1), torch.cat(lses)

    def _keys(self, x, order, sent, own):
        """Keys that travel, in the order of the mask, and then those that stay here."""
        rows = len(order) // self._mesh.size()  # of each rank, which has them first
        travelled = self._gathered(x[:rows]).index_select(0, order)
        return torch.cat([travelled, x[len(x) - len(own) :]])

    def _gathered(self, x):
        """The tokens of all ranks, in the order of the ranks; gradients are summed on the way back."""
        rows = DTensor.from_local(x.contiguous(), self._mesh, (Shard(0), Shard(0)), run_check=False)
        rows = rows.redistribute(self._mesh, (Shard(0), Replicate()))  # within the node
        rows = rows.redistribute(self._mesh, (Replicate(), Replicate()))  # between nodes
        return rows.to_local(grad_placements=(Partial(), Partial()))
