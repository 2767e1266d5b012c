"""The half of Ulysses that moves tensors (see `context/ulysses.py`).

Before attention each rank sends the heads of its tokens to the ranks whose share they are; after it the
outputs go back the same way. A key head that several ranks share is sent to each of them, and its gradients
are added when they come back.

Shape suffixes: L tokens of this rank, N heads, H head dim, W heads x head dim of what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from wlb_titan.context.ulysses import Ulysses, head_shares
from wlb_titan.runtime.attention.module import Attend, Attended
from wlb_titan.runtime.compat import all_to_all_single_autograd


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
