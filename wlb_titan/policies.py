"""The names of a job's policies."""

from __future__ import annotations

import re
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
        return cls(*policy_parts(text))

    def __str__(self) -> str:
        return ":".join(self if self.order != "as_packed" else self[:2])


def policy_parts(text: str) -> list[str]:
    """One to three names: `wlb:adaptive`, or classes in full, `own.packing:Reversed:own.sharding:Contiguous`.

    Raises:
        UserError: a part is not known.
    """
    # A class begins with a capital letter, and so the colon before it separates no parts.
    parts = [part.strip() for part in re.split(r":(?!\s*[A-Z])", text)]
    families = (POLICIES, STRATEGIES, ORDERS)
    if len(parts) > len(families):
        raise PlanError(f"{text!r} has too many parts; a policy is packing[:sharding[:order]].")
    for part, family in zip(parts, families, strict=False):
        family.find(part)
    return parts
