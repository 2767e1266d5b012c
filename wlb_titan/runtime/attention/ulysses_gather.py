"""The half of two-dimensional context parallelism that moves tensors (see `context/ulysses_gather.py`).

Ulysses on one mesh axis, with all-gather on another one as the attention in its middle.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from wlb_titan.context.all_gather import PerDocument
from wlb_titan.context.ulysses import Ulysses
from wlb_titan.context.ulysses_gather import UlyssesGather
from wlb_titan.runtime.attention.all_gather import AllGatherAttention
from wlb_titan.runtime.attention.module import Attend, Attended
from wlb_titan.runtime.attention.ulysses import UlyssesAttention


class UlyssesGatherAttention:
    """The group's tokens and this rank's share of the heads, and everybody's keys of these heads."""

    def __init__(self, config: UlyssesGather.Config, mesh: DeviceMesh) -> None:
        self._gather = AllGatherAttention(PerDocument.Config(), mesh["cp_between"])
        self._ulysses = UlyssesAttention(Ulysses.Config(), mesh["cp_within"])

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
        """As `ContextAttention` says; `exchange` is the order of the keys gathered over the groups."""

        def gathered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attended:
            return self._gather(q, k, v, exchange, attend, wants_lse=wants_lse)

        return self._ulysses(q_LNH, k_LNH, v_LNH, (), gathered, wants_lse=wants_lse)
