"""`profile:FILE`: attention as `wlb-titan profile` measured it, all else by operations at measured rates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats
from wlb_titan.cost.analytic import Analytic
from wlb_titan.cost.attention_latency import AttentionLatency
from wlb_titan.cost.profile import AttentionShape, Profile
from wlb_titan.cost.workload import CostModel

if TYPE_CHECKING:
    from wlb_titan.job import Job


class Measured(CostModel):
    """W_a as measured on a device, W_l by operations at its measured rates, or else at the cluster's."""

    @dataclass(kw_only=True, slots=True)
    class Config(CostModel.Config):
        file: str
        """Path of the profile."""

    def __init__(
        self, attention: AttentionLatency, layers: int, context_parallel: int, linear: Analytic
    ) -> None:
        self._attention_of_layer = attention
        self._share = layers / context_parallel
        self._linear = linear

    @classmethod
    def of(cls, config: Config, job: Job) -> Measured:
        tensor, context = job.degrees.tensor, job.degrees.context
        profile = Profile.load(Path(config.file))
        latency = profile.latency(AttentionShape.of(job.model, tensor, job.dtype))
        linear = Analytic.on(profile.on(job.cluster), job)
        return cls(latency, job.model.layers, context, linear)

    def forward(self, lengths: NDArray[Any]) -> Floats:
        return self._attention(lengths, 0) + self._linear.linear_forward * np.asarray(lengths, np.float64)

    def backward(self, lengths: NDArray[Any]) -> Floats:
        return self._attention(lengths, 1) + self._linear.linear_backward * np.asarray(lengths, np.float64)

    def _attention(self, lengths: NDArray[Any], direction: int) -> Floats:
        seconds: Floats = self._attention_of_layer.work(lengths, lengths)[direction]
        return seconds * self._share
