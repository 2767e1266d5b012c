"""The names of a job's policies."""

from __future__ import annotations

from typing import NamedTuple

from wlb_titan.context import STRATEGIES
from wlb_titan.errors import PlanError
from wlb_titan.packing import POLICIES
from wlb_titan.pipeline.order import ORDERS


class Policy(NamedTuple):
    """How micro-batches are packed, sharded over context-parallel ranks and ordered in the pipeline."""

    packing: str
    sharding: str = "per_sequence"
    order: str = "as_packed"

    @classmethod
    def parse(cls, text: str) -> Policy:
        """`packing[:sharding[:order]]`, such as `wlb:adaptive` or `wlb_lazy:hybrid:best`.

        Raises:
            UserError: a part is not known.
        """
        parts = [part.strip() for part in text.split(":")]
        if len(parts) > 3:
            raise PlanError(f"{text!r} has too many parts; a policy is packing[:sharding[:order]].")
        for part, family in zip(parts, (POLICIES, STRATEGIES, ORDERS), strict=False):
            family.find(part)
        return cls(*parts)

    def __str__(self) -> str:
        return ":".join(self if self.order != "as_packed" else self[:2])
