"""The half of `ulysses_gather` that moves tensors: Ulysses on one mesh axis, and keys gathered on the other
where its attention would run."""

from wlb_titan.context.all_gather import PerDocument
from wlb_titan.context.ulysses import Ulysses
from wlb_titan.runtime.attention.exchange import AllGatherAttention, UlyssesAttention


class UlyssesGatherAttention:
    """The group's tokens and all groups' keys, for this rank's share of the heads."""

    def __init__(self, config, mesh):
        self._gather = AllGatherAttention(PerDocument.Config(), mesh["cp_between"])
        self._ulysses = UlyssesAttention(Ulysses.Config(), mesh["cp_within"])

    def __call__(self, q, k, v, exchange, attend, *, wants_lse):
        """Tensors are (tokens, heads, head dim); `exchange` says how keys are gathered over the groups."""

        def gathered(q, k, v):
            return self._gather(q, k, v, exchange, attend, wants_lse=wants_lse)

        return self._ulysses(q, k, v, (), gathered, wants_lse=wants_lse)
