"""The degrees of 4D parallelism (paper section 2.1): TP, CP, PP, and DP, which shards or replicates.

Expert parallelism is none of them: it borrows ranks of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from wlb_titan.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """How many ranks share the work along each dimension.

    Attributes:
        tensor: ranks that split each layer, with sequence parallelism.
        context: ranks that split each micro-batch's tokens.
        pipeline: ranks that split the layers.
        shard: data-parallel ranks that shard weights, gradients and optimizer state (FSDP).
        replicate: replicas of these (HSDP).
        expert: ranks that share a layer's experts, taken from those of TP, CP and `shard`; their product is a
            multiple of it.

    Raises:
        PlanError: a degree is below 1, or expert parallelism does not divide the ranks that it borrows.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    shard: int = 1
    replicate: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if (degree := getattr(self, field.name)) < 1:
                raise PlanError(f"The {field.name} parallel degree is {degree}; it must be at least 1.")
        if self.tensor * self.sharding_ranks % self.expert:
            raise PlanError(
                f"The expert parallel degree {self.expert} does not divide TP {self.tensor} x CP "
                f"{self.context} x {self.shard} sharding data-parallel ranks, of which it takes its own."
            )

    @property
    def data(self) -> int:
        """Data-parallel degree: ranks that run different micro-batches."""
        return self.shard * self.replicate

    @property
    def ranks(self) -> int:
        """GPUs of the job."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def sharding_ranks(self) -> int:
        """Ranks over which FSDP shards weights: context-parallel ranks would hold the same ones."""
        return self.shard * self.context

    def check_ranks(self, gpus: int) -> None:
        """Raises PlanError where the degrees do not multiply to the GPUs that there are."""
        if self.ranks != gpus:
            raise PlanError(f"{self} is {self.ranks} GPUs, and the job has {gpus}. Change a degree to match.")

    def __str__(self) -> str:
        text = f"TP {self.tensor} x CP {self.context} x PP {self.pipeline} x DP {self.data}"
        if self.replicate > 1 < self.shard:
            text += f" ({self.replicate} replicas of {self.shard})"
        return text + (f", EP {self.expert}" if self.expert > 1 else "")
