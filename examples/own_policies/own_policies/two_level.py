"""A strategy with mesh axes of its own: keys are gathered within nodes, and then between them.

This is the half that planning, memory and time ask; `two_level_attention` moves the tensors.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from wlb_titan.context import Move
from wlb_titan.context.all_gather import PerDocument
from wlb_titan.errors import PlanError


class TwoLevel(PerDocument):
    """As `per_document`, with a collective on each of the two axes."""

    @dataclass(kw_only=True, slots=True)
    class Config(PerDocument.Config):
        within: Annotated[int, Ge(1)] = 2
        """Context-parallel ranks of a node."""

    attention = "own_policies.two_level_attention:TwoLevelAttention"

    def __init__(self, config, ranks, latency, moves=()):
        super().__init__(config, ranks, latency, moves)
        self._within = config.within

    def check(self, model, tensor):
        super().check(model, tensor)
        if self.ranks % self._within:
            raise PlanError(
                f"{self.ranks} context-parallel ranks cannot be divided into nodes of {self._within}.",
                setting="sharding.within",
            )

    @property
    def meshes(self):
        return ({"between": self.ranks // self._within, "within": self._within},)

    def exchange(self, model, tensor):
        once = super().exchange(model, tensor)
        keys, between = once.keys, self.ranks // self._within
        moves = (
            Move(keys / between * (1 - 1 / self._within), 1, self._within),
            Move(keys * (1 - 1 / between), 1, between, stride=self._within),
        )
        return replace(once, moves=moves)

    def travelling(self, sharding, total, slices=None):
        (tokens,) = super().travelling(sharding, total, slices)
        return tokens, tokens
