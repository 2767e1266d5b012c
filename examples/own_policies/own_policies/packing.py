"""A packing policy."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from wlb_titan.packing.plain import Plain


class Reversed(Plain):
    """Plain windows, those of a step in the opposite order."""

    @dataclass(kw_only=True, slots=True)
    class Config(Plain.Config):
        every: Annotated[int, Ge(1)] = 1
        """One of this many steps is reversed."""

    def __init__(self, config, stream, ask):
        super().__init__(config, stream, ask)
        self._every, self._step = config.every, 0

    def next(self):
        packing = super().next()
        if self._step % self._every == 0:
            packing.packs.reverse()
        self._step += 1
        return packing

    def state_dict(self):
        return {"step": self._step}

    def load_state_dict(self, state):
        self._step = state["step"]
