"""A strategy with mesh axes of its own: keys are gathered within nodes, and then between them.

This is the half that planning, memory and time ask; `two_level_attention` moves the tensors.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from wlb_titan.context.all_gather import PerDocument
from wlb_titan.errors import PlanError


class TwoLevel(PerDocument):
    """As `per_document`, with two collectives where the other has one."""

    @dataclass(kw_only=True, slots=True)
    class Config(PerDocument.Config):
        within: Annotated[int, Ge(1)] = 2
        """Context-parallel ranks of a node."""

    attention = "own_policies.two_level_attention:TwoLevelAttention"

    def __init__(self, config, ranks, latency):
        super().__init__(config, ranks, latency)
        self._within = config.within

    def check(self, model, tensor):
        super().check(model, tensor)
        if self.ranks % self._within:
            raise PlanError(
                f"{self.ranks} context-parallel ranks cannot be divided into nodes of {self._within}.",
                setting="sharding.within",
            )

    def exchange(self, model, tensor):
        once = super().exchange(model, tensor)
        return replace(once, collectives=2 * once.collectives)
