"""The hardware that a prediction is for, from a TOML file: the one home of its figures.

The fields of `Cluster` and `Link` name the sections and keys of the file (docs/simulator.md has an example):
bytes, FLOP/s and bytes/s of one GPU, and seconds of one collective. All rates but the peak are achieved ones,
not those of the data sheet. Ranks are laid out with tensor parallelism innermost, then context, data and
pipeline parallelism, so that inner groups fill nodes (section 6.1).
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from wlb_titan.errors import PlanError, reading, regular

CLUSTERS = Path(__file__).with_name("clusters")
UNKNOWN = "h100_roce"  # whose rates stand for those of a GPU without a shipped cluster


def _figure(key: str, low: float, high: float, unit: str, **default: Any) -> Any:
    """A field that is a number in the file, from `low` to `high`."""
    return field(metadata={"key": key, "range": (low, high), "unit": unit}, **default)


@dataclass(frozen=True, slots=True)
class Link:
    """What a group of ranks communicates over: bytes/s of one rank, seconds of one collective."""

    bandwidth: float = _figure("bandwidth", 1e6, 1e15, "bytes/s")
    latency: float = _figure("latency", 0, 1, "seconds")

    def collective(self, bytes_: float, ranks: int) -> float:
        """Seconds of an all-gather or reduce-scatter of `bytes_` in total over `ranks`."""
        if ranks == 1:
            return 0.0
        return bytes_ * (ranks - 1) / ranks / self.bandwidth + self.latency


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    name: str
    kind: Literal["gpu", "cpu"] = "gpu"  # on a CPU nothing overlaps, and memory bounds no micro-batch
    memory: float = _figure("[gpu] memory", 1e6, 1e14, "bytes")
    peak_flops: float = _figure("[gpu] peak_flops", 1e8, 1e18, "FLOP/s")
    linear_flops: float = _figure("[gpu] linear_flops", 1e8, 1e18, "FLOP/s")
    attention_flops: float = _figure("[gpu] attention_flops", 1e7, 1e18, "FLOP/s")
    attention_backward_flops: float = _figure("[gpu] attention_backward_flops", 1e7, 1e18, "FLOP/s")
    memory_bandwidth: float = _figure("[gpu] memory_bandwidth", 1e7, 1e15, "bytes/s")
    gpus_per_node: int = _figure("[node] gpus", 1, 65536, "GPUs")
    node: Link
    network: Link
    attention_profile: str = ""  # path of a profile of the GPU; empty for the attention of H100 and H200
    layer: tuple[float, float] = (0.0, 0.0)  # seconds, as of `Profile.layer`
    device: str = ""  # part of the name of its GPUs
    units: int = _figure("[gpu] units", 1, 100000, "multiprocessors", default=132)
    capability: float = _figure("[gpu] capability", 8, 99, "major.minor", default=9.0)

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


TEXTS = ("name", "kind", "[gpu] attention_profile", "[gpu] device")
FIGURES: dict[str, Field[Any]] = {
    **{f.metadata["key"]: f for f in fields(Cluster) if f.metadata},
    **{f"[{name}] {f.metadata['key']}": f for name in ("node", "network") for f in fields(Link)},
}


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
    ships = f"Name a TOML file, or one of the shipped clusters {', '.join(shipped())}."
    with reading(lambda reason: _wrong(f"The cluster file {name} cannot be read: {reason}. {ships}")):
        return _read(Path(name))


@cache
def _shipped(name: str) -> Cluster:
    return _read(CLUSTERS / f"{name}.toml")


def _read(path: Path) -> Cluster:
    try:
        record = tomllib.loads(regular(path).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise _wrong(f"The cluster file {path} is not TOML: {error}.") from error
    given: dict[str, Any] = {}
    for section, value in record.items():
        if isinstance(value, dict):
            given |= {f"[{section}] {key}": figure for key, figure in value.items()}
        else:
            given[section] = value
    for key in given:
        if key not in FIGURES and key not in TEXTS:
            raise _wrong(f"{path}: {key} is not known. A cluster file has {', '.join([*TEXTS, *FIGURES])}.")
    if (kind := given.get("kind", "gpu")) not in ("gpu", "cpu"):
        raise _wrong(f'{path}: kind is {kind!r}; it must be "gpu" or "cpu".')
    figures = {key: _figure_of(given.get(key), key, path) for key in FIGURES}
    profile = given.get("[gpu] attention_profile", "")
    return Cluster(
        name=str(given.get("name", path)),
        kind=kind,
        attention_profile=str(path.parent / profile) if profile else "",
        device=str(given.get("[gpu] device", "")),
        node=Link(figures["[node] bandwidth"], figures["[node] latency"]),
        network=Link(figures["[network] bandwidth"], figures["[network] latency"]),
        **{f.name: figures[f.metadata["key"]] for f in fields(Cluster) if f.metadata},
    )


def _figure_of(value: Any, key: str, path: Path) -> Any:
    figure = FIGURES[key]
    (low, high), unit = figure.metadata["range"], figure.metadata["unit"]
    if value is None and figure.default is not MISSING:
        return figure.default
    kinds, text = ((int,), "a whole number") if figure.type == "int" else ((int, float), "a number")
    if type(value) not in kinds or not low <= value <= high:
        said = "missing" if value is None else repr(value)
        raise _wrong(f"{path}: {key} is {said}; it must be {text} of {unit}, from {low:g} to {high:g}.")
    return kinds[-1](value)


def _wrong(message: str) -> PlanError:
    return PlanError(message, setting="wlb.cluster")
