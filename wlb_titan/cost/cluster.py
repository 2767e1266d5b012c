"""The hardware that a prediction is for, from a TOML file: the one home of its figures.

The fields of `Gpu`, `Link` and `_Node` are the keys of the file's sections (docs/simulator.md has an
example). All rates but the peak are achieved ones, not those of the data sheet. Ranks are laid out with
tensor parallelism innermost, then context, data and pipeline parallelism, so that inner groups fill nodes
(section 6.1).
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from wlb_titan.errors import PlanError, refusing

CLUSTERS = Path(__file__).with_name("clusters")
UNKNOWN = "h100_roce"  # whose rates stand for those of a GPU without a shipped cluster


@dataclass(frozen=True, slots=True)
class Link:
    """What a group of ranks communicates over: bytes/s of one rank, seconds of one collective."""

    bandwidth: Annotated[float, Interval(ge=1e6, le=1e15)]  # bytes/s
    latency: Annotated[float, Interval(ge=0, le=1)]  # seconds

    def collective(self, bytes_: float, ranks: int) -> float:
        """Seconds of an all-gather or reduce-scatter of `bytes_` in total over `ranks`."""
        if ranks == 1:
            return 0.0
        return bytes_ * (ranks - 1) / ranks / self.bandwidth + self.latency


@dataclass(frozen=True, kw_only=True)
class Gpu:
    memory: Annotated[float, Interval(ge=1e6, le=1e14)]  # bytes
    peak_flops: Annotated[float, Interval(ge=1e8, le=1e18)]  # FLOP/s
    linear_flops: Annotated[float, Interval(ge=1e8, le=1e18)]
    attention_flops: Annotated[float, Interval(ge=1e7, le=1e18)]
    attention_backward_flops: Annotated[float, Interval(ge=1e7, le=1e18)]
    memory_bandwidth: Annotated[float, Interval(ge=1e7, le=1e15)]  # bytes/s
    units: Annotated[int, Interval(ge=1, le=100000)] = 132  # multiprocessors
    capability: Annotated[float, Interval(ge=8, le=99)] = 9.0  # major.minor
    linear_flops_float8: Annotated[float, Interval(ge=0, le=1e18)] = 0.0  # 0: as linear_flops
    device: str = ""  # part of the name of its GPUs
    attention_profile: str = ""  # path of a profile of the GPU; empty for the attention of H100 and H200

    def product_flops(self, float8: float) -> float:
        """FLOP/s of matrix products of which this share is in float8."""
        fast = self.linear_flops_float8 or self.linear_flops
        return 1 / ((1 - float8) / self.linear_flops + float8 / fast) if float8 else self.linear_flops


@dataclass(frozen=True, kw_only=True)
class Cluster(Gpu):
    name: str
    kind: Literal["gpu", "cpu"] = "gpu"  # on a CPU nothing overlaps, and memory bounds no micro-batch
    gpus_per_node: int
    node: Link
    network: Link
    layer: tuple[float, float] = (0.0, 0.0)  # seconds, as of `Profile.layer`
    experts: float = 1.0  # as of `Profile.experts`

    def link(self, ranks: int, stride: int = 1) -> Link:
        """The link of ranks that are `stride` GPUs apart. Across nodes each GPU's network card carries a
        share, as in NCCL's rings: 8 GPUs a node have 8 times the bandwidth of one, up to that of the node."""
        if ranks * stride <= self.gpus_per_node:
            return self.node
        neighbours = max(self.gpus_per_node // stride, 1)
        return replace(self.network, bandwidth=min(self.node.bandwidth, neighbours * self.network.bandwidth))

    def all_to_all(self, bytes_: float, ranks: int) -> float:
        """Seconds of an all-to-all without its latency, over neighbouring ranks that fill nodes. Each sends
        equal shares of its `bytes_`: to other nodes through its network card, and meanwhile in its node."""
        inside = min(ranks, self.gpus_per_node)
        near = bytes_ * (inside - 1) / ranks / self.node.bandwidth
        return max(near, bytes_ * (ranks - inside) / ranks / self.network.bandwidth)


@dataclass(frozen=True)
class _Node(Link):
    gpus: Annotated[int, Interval(ge=1, le=65536)]


@dataclass(frozen=True, kw_only=True)
class _File:
    gpu: Gpu
    node: _Node
    network: Link
    name: str = ""
    kind: Literal["gpu", "cpu"] = "gpu"


@cache
def shipped() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in CLUSTERS.glob("*.toml")))


def cluster_of_device(name: str) -> str | None:
    """The shipped cluster whose [gpu] device is in a GPU's name, in whole words."""
    named = ((cluster, load_cluster(cluster).device) for cluster in shipped())
    whole = (cluster for cluster, device in named if device and re.search(rf"\b{re.escape(device)}\b", name))
    return next(whole, None)


def cluster_of_gpu(name: str, memory: float) -> Cluster:
    """The shipped cluster of a GPU, or the rates of `UNKNOWN`, with at most `memory` bytes."""
    matching = cluster_of_device(name)
    cluster = load_cluster(matching or UNKNOWN)
    if matching:
        return replace(cluster, memory=min(cluster.memory, memory))
    return replace(cluster, name=f"{name} with the rates of {cluster.name}", memory=memory)


def load_cluster(name: str) -> Cluster:
    """A shipped cluster by its name, or one from the path of a TOML file."""
    if name in shipped():
        return _shipped(name)
    like = f"{UNKNOWN}.toml in {CLUSTERS}, which has all keys with their units"
    known = f"Name a TOML file like {like}, or one of the shipped clusters {', '.join(shipped())}"
    wrong = f"The cluster file {name} cannot be read"
    with refusing(lambda reason: PlanError(f"{wrong}: {reason}. {known}.", setting="wlb.cluster")):
        from wlb_titan.files import load  # and pydantic, without which shipped ones are read

        return _cluster(load(_File, Path(name), toml=True), Path(name))


@cache
def _shipped(name: str) -> Cluster:
    path = CLUSTERS / f"{name}.toml"
    keys = tomllib.loads(path.read_text(encoding="utf-8"))
    sections = {
        key: section(**keys[key]) for key, section in (("gpu", Gpu), ("node", _Node), ("network", Link))
    }
    return _cluster(_File(**keys | sections), path)


def _cluster(file: _File, path: Path) -> Cluster:
    profile, node = file.gpu.attention_profile, file.node
    return Cluster(
        **vars(file.gpu) | {"attention_profile": str(path.parent / profile) if profile else ""},
        name=file.name or str(path),
        kind=file.kind,
        gpus_per_node=node.gpus,
        node=Link(node.bandwidth, node.latency),
        network=file.network,
    )
