"""`auto`: the packing policy that is predicted fastest; `simulator.scenario` finds it."""

from __future__ import annotations

from dataclasses import dataclass

from wlb_titan.packing.plain import Plain


class Auto(Plain):
    """Whichever policy is predicted fastest on these documents; `plain` until it is chosen."""

    @dataclass(kw_only=True, slots=True)
    class Config(Plain.Config):
        max_length: int | None = None
        """L_max of the policies that have one."""

    automatic = True
