"""Everything but attention as `wlb-titan profile` measured it: matrices, element-wise operators, gathers.

Each is a line, fixed + size x each seconds: FLOPs of matrix products, bytes that element-wise operators read
and write, bytes that a rank receives in an all-gather. Planning takes the slopes, as rates. The fixed part of
a gather is its latency; those of launches are small beside the micro-batches that planning is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from wlb_titan.cost.cluster import Cluster, Link

Points = tuple[tuple[float, float], ...]
"""(size, seconds) of each measurement."""


@dataclass(frozen=True, slots=True)
class LinearProfile:
    """What was measured on one device, or between the devices of one node.

    Attributes:
        dtype: data type of the operands, as torch names it.
        matrices: FLOPs and seconds.
        elements: bytes and seconds.
        gathers: bytes that each rank receives, and seconds; empty with one device.
        ranks: ranks of the gathers.
    """

    dtype: str
    matrices: Points
    elements: Points
    gathers: Points = ()
    ranks: int = 1

    @property
    def matrix_flops(self) -> float:
        """FLOP/s of matrix products."""
        return 1 / line(self.matrices)[1]

    @property
    def element_bandwidth(self) -> float:
        """Bytes/s of element-wise operators."""
        return 1 / line(self.elements)[1]

    @property
    def link(self) -> Link | None:
        """What the devices of the node communicate over; None if there was one device."""
        if not self.gathers:
            return None
        fixed, each = line(self.gathers)
        return Link(1 / each, fixed)

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster at the measured rates."""
        return replace(cluster, linear_flops=self.matrix_flops, memory_bandwidth=self.element_bandwidth)

    def to_json(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "ranks": self.ranks,
            **{name: [list(point) for point in getattr(self, name)] for name in KINDS},
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        points = {
            name: tuple((float(size), float(seconds)) for size, seconds in record[name]) for name in KINDS
        }
        return cls(dtype=str(record["dtype"]), ranks=int(record["ranks"]), **points)


KINDS = ("matrices", "elements", "gathers")


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fixed seconds and seconds a unit, by least squares of relative errors; neither below zero.

    Args:
        points: (size, seconds), of two sizes at least.

    Example: 1 second and 2 seconds a unit:

        >>> [round(value, 6) for value in line([(1, 3), (2, 5), (4, 9)])]
        [1.0, 2.0]
    """
    sizes, seconds = np.array(points, dtype=np.float64).T
    columns = np.stack([1 / seconds, sizes / seconds], axis=1)
    fixed, each = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    if fixed >= 0 and each > 0:
        return float(fixed), float(each)
    return 0.0, float((columns[:, 1] @ np.ones(len(sizes))) / (columns[:, 1] @ columns[:, 1]))
