"""The settings of a training configuration that decide about memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wlb_titan.cost.degrees import Degrees
from wlb_titan.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySettings:
    """The settings of a training configuration that decide about memory, besides shape, degrees and lengths.

    Attributes:
        checkpointing: `none`, `selective` or `full` activation checkpointing.
        parameter_bytes: bytes of a weight as the optimizer keeps it, and of its gradient.
        compute_bytes: bytes of a weight or an activation in forward and backward.
        optimizer_bytes: bytes of a weight's state: AdamW has two moments in float32.
        loss_chunks: pieces of a micro-batch of which the logits exist one at a time.
        window: context window in tokens, for which every layer has a table of rotary factors.
        rotary_bytes: bytes of such a table for each position and element of the head dim.
        sequence_parallel: whether tensor parallelism divides the tokens of hidden states.
        offload: share of what layers keep from forward to backward that lies in the host's memory meanwhile.
        reshard: whether FSDP frees a layer's gathered weights after each pass. None is torchtitan's default:
            not under pipeline parallelism, where micro-batches add up gradients before they are reduced.
    """

    checkpointing: Literal["none", "selective", "full"] = "selective"
    parameter_bytes: int = 4
    compute_bytes: int = 2
    optimizer_bytes: int = 8
    loss_chunks: int = 8
    window: int = 0
    rotary_bytes: int = 4
    sequence_parallel: bool = True
    offload: float = 0.0
    reshard: bool | None = None

    def __post_init__(self) -> None:
        if self.checkpointing not in ("none", "selective", "full"):
            raise PlanError(
                f"No activation checkpointing is called {self.checkpointing!r}; there are none, selective "
                "and full."
            )
        if not 0 <= self.offload <= 1:
            raise PlanError(f"The share of activations to offload is {self.offload}; it is between 0 and 1.")

    def reshards(self, degrees: Degrees) -> bool:
        """Whether gathered weights are freed after each pass at these degrees."""
        return degrees.pipeline == 1 if self.reshard is None else self.reshard
