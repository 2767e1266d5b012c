"""`auto`: the packing policy that is predicted fastest; `simulator.choice` finds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from wlb_titan.packing.plain import Plain
from wlb_titan.packing.policy import MOST_TOKENS


class Auto(Plain):
    """Whichever policy is predicted fastest on these documents; `plain` until it is chosen."""

    @dataclass(kw_only=True, slots=True)
    class Config(Plain.Config):
        max_length: Annotated[int, Interval(ge=2, le=2 * MOST_TOKENS)] | None = None
        """L_max of the policies that have one."""

    automatic = True
