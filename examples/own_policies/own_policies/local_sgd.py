"""A dimension of parallelism: replicas that train apart, and average their weights every few steps.

Local SGD (Stich 2019), and with `outer_rate` the outer step of DiLoCo (Douillard and others 2023) without its
momentum. This half is for planning, memory and time; `local_sgd_runtime` moves the tensors.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Interval

from wlb_titan.dimensions.dimension import Dimension, Meeting

TENSORS = 9  # of a Llama's layer: seven matrices and two norms


class LocalSgd(Dimension):
    """Data-parallel replicas that meet every `every` steps instead of in each."""

    @dataclass(kw_only=True, slots=True)
    class Config(Dimension.Config):
        every: Annotated[int, Ge(1)] = 8
        """Steps from one averaging to the next."""

        outer_rate: Annotated[float, Interval(gt=0, le=2)] = 1.0
        """How far weights go from the last average to this one; other than 1 keeps the last one."""

    axis, divides = "local", "data"
    runtime = "own_policies.local_sgd_runtime:Averaging"

    @property
    def every(self):
        return self.config.every

    def memory(self, rates, peak):
        kept = peak.weights if self.config.outer_rate != 1 else 0
        return replace(peak, dimensions=peak.dimensions + kept)

    def meeting(self, rates, weights):
        each = rates.memory.parameter_bytes + rates.memory.optimizer_bytes
        return Meeting(weights * each, 3 * TENSORS * max(rates.layers) * rates.chunks)
