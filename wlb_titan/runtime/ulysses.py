"""The half of Ulysses that moves tensors (see `context/ulysses.py`).

Before attention every rank sends every other the heads that are its share, for its own tokens; after it the
outputs go back the same way. A key head that several ranks share is sent to each of them, and its gradients
are added when they come back.

Shape suffixes: L tokens of this rank, R ranks, N heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from wlb_titan.context.ulysses import Ulysses, head_shares
from wlb_titan.runtime.attention import Attend


class UlyssesAttention:
    """All tokens and this rank's share of the heads."""

    def __init__(self, config: Ulysses.Config, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __call__(
        self,
        q_LNH: torch.Tensor,
        k_LNH: torch.Tensor,
        v_LNH: torch.Tensor,
        exchange: tuple[torch.Tensor, ...],
        attend: Attend,
    ) -> torch.Tensor:
        """As `ContextAttention` says; `exchange` is empty."""
        shares = head_shares(q_LNH.shape[1], k_LNH.shape[1], self._mesh.size())
        mine = shares[self._mesh.get_local_rank()]
        queries = [share.queries.stop - share.queries.start for share in shares]
        keys = mine.keys.stop - mine.keys.start
        sent = [torch.cat([q_LNH[:, s.queries], k_LNH[:, s.keys], v_LNH[:, s.keys]], dim=1) for s in shares]
        own = queries[self._mesh.get_local_rank()]
        heads = self._exchanged(sent, [own + 2 * keys] * len(shares))
        q, k, v = torch.cat(heads).split([own, keys, keys], dim=1)
        output = attend(q, k, v, mine.queries)
        return torch.cat(self._exchanged(output.chunk(len(shares)), queries), dim=1)

    def _exchanged(self, sent: Sequence[torch.Tensor], heads: Sequence[int]) -> list[torch.Tensor]:
        """One all-to-all.

        Args:
            sent: (L, N, H) to each rank; N may differ.
            heads: that come from each.

        Returns:
            (L, N, H) from each rank.
        """
        tokens, _, dim = sent[0].shape
        received = all_to_all_single_autograd(
            torch.cat([part.flatten() for part in sent]),
            [tokens * count * dim for count in heads],
            [part.numel() for part in sent],
            self._mesh.get_group(),
        )
        parts = received.split([tokens * count * dim for count in heads])
        return [part.view(tokens, count, dim) for part, count in zip(parts, heads, strict=True)]
