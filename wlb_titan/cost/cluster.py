"""The hardware that a prediction is for, from a TOML file: the one home of such figures.

FIGURES, OPTIONAL and TEXTS have the sections and keys of the file, docs/simulator.md has a whole one: bytes,
FLOP/s, bytes/s of one GPU, and seconds of one collective. All rates but the peak are what the device achieves
on this kind of work, not what its data sheet promises. Ranks are laid out with tensor parallelism innermost,
then context, data and pipeline parallelism, so that inner groups fill nodes (section 6.1).
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from wlb_titan.errors import PlanError

# Sections and keys of the file: the smallest and largest figure that can be meant, and the unit.
FIGURES = {
    ("gpu", "memory"): (1e8, 1e14, "bytes"),
    ("gpu", "peak_flops"): (1e8, 1e18, "FLOP/s"),
    ("gpu", "linear_flops"): (1e8, 1e18, "FLOP/s"),
    ("gpu", "attention_flops"): (1e7, 1e18, "FLOP/s"),
    ("gpu", "attention_backward_flops"): (1e7, 1e18, "FLOP/s"),
    ("gpu", "memory_bandwidth"): (1e7, 1e15, "bytes/s"),
    ("node", "gpus"): (1, 65536, "GPUs"),
    ("node", "bandwidth"): (1e6, 1e15, "bytes/s"),
    ("node", "latency"): (0, 1, "seconds"),
    ("network", "bandwidth"): (1e6, 1e15, "bytes/s"),
    ("network", "latency"): (0, 1, "seconds"),
}
OPTIONAL = {
    ("gpu", "units"): (1, 100000, "multiprocessors"),
    ("node", "host_bandwidth"): (1e6, 1e15, "bytes/s"),
}
TEXTS = (("", "name"), ("gpu", "attention_profile"), ("gpu", "device"))

UNKNOWN = "h100_roce"
"""Whose rates stand for those of a GPU that no shipped cluster knows."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a group of ranks communicates over: bytes/s of each of them, seconds of one collective."""

    bandwidth: float
    latency: float

    def collective(self, bytes_: float, ranks: int) -> float:
        """Seconds of an all-gather or reduce-scatter of `bytes_` in all over so many ranks."""
        if ranks == 1:
            return 0.0
        return bytes_ * (ranks - 1) / ranks / self.bandwidth + self.latency


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """GPUs in nodes in a network; the attributes are the keys of the file.

    `attention_profile` is the path of a profile of the GPU's attention, empty for the figures of H100 and
    H200; `units` are its multiprocessors, of which an H100 has 132; `host_bandwidth` is None where the file
    has none.
    """

    name: str
    memory: float
    peak_flops: float
    linear_flops: float
    attention_flops: float
    attention_backward_flops: float
    memory_bandwidth: float
    gpus_per_node: int
    node: Link
    network: Link
    attention_profile: str = ""
    device: str = ""
    units: int = 132
    host_bandwidth: float | None = None

    def link(self, ranks: int, stride: int = 1) -> Link:
        """What a group of ranks communicates over whose members are `stride` GPUs apart.

        A group that spans nodes has the network cards of all its GPUs of a node: as NCCL's rings do, each
        carries its share, so that 8 GPUs a node have 8 times the bandwidth of one, up to that of the node.
        """
        if ranks * stride <= self.gpus_per_node:
            return self.node
        neighbours = max(self.gpus_per_node // stride, 1)
        return replace(self.network, bandwidth=min(self.node.bandwidth, neighbours * self.network.bandwidth))

    def all_to_all(self, bytes_: float, ranks: int) -> float:
        """Seconds of an all-to-all without its latency, over neighbouring ranks that fill nodes.

        Every GPU sends what goes to other nodes through its own network card, and the rest meanwhile within
        its node.

        Args:
            bytes_: that each rank has, of which it sends an equal share to every rank.
        """
        inside = min(ranks, self.gpus_per_node)
        near = bytes_ * (inside - 1) / ranks / self.node.bandwidth
        return max(near, bytes_ * (ranks - inside) / ranks / self.network.bandwidth)

    def slower_network(self, factor: float) -> Cluster:
        """This cluster with a network of that many times the latency and less bandwidth."""
        network = Link(self.network.bandwidth / factor, self.network.latency * factor)
        return replace(self, name=f"{self.name}, network {factor:g}x slower", network=network)


@cache
def shipped() -> tuple[str, ...]:
    """The names of the files in the folder clusters."""
    files = (resources.files("wlb_titan.cost") / "clusters").iterdir()
    return tuple(sorted(file.name[: -len(".toml")] for file in files if file.name.endswith(".toml")))


def cluster_of_device(name: str) -> str | None:
    """The shipped cluster whose [gpu] device is in a GPU's name, in whole words; None if there is none."""
    known = ((cluster, load_cluster(cluster).device) for cluster in shipped())
    whole = (cluster for cluster, device in known if device and re.search(rf"\b{re.escape(device)}\b", name))
    return next(whole, None)


def cluster_of_gpu(name: str, memory: float) -> Cluster:
    """The shipped cluster of a GPU's name, with at most so many bytes; where there is none another's rates
    with this memory."""
    known = cluster_of_device(name)
    cluster = load_cluster(known or UNKNOWN)
    if known:
        return replace(cluster, memory=min(cluster.memory, memory))
    return replace(cluster, name=f"{name} with the rates of {cluster.name}", memory=memory)


def load_cluster(name: str) -> Cluster:
    """A shipped cluster by its name, or one from a file.

    Args:
        name: one of `shipped`, or the path of a TOML file.

    Raises:
        PlanError: there is no such file, it is not TOML, or a figure is missing, unknown or absurd; the
            message names file, section and key. Its setting is wlb.cluster.
    """
    if name in shipped():
        return _shipped(name)
    path = Path(name)
    try:
        return _parse(path.read_text(encoding="utf-8"), name, path.parent)
    except OSError as error:
        raise PlanError(
            f"The cluster file {name} cannot be read: {error.strerror}. Name a TOML file, or one of the "
            f"shipped clusters {', '.join(shipped())}.",
            setting="wlb.cluster",
        ) from error
    except PlanError as error:
        raise PlanError(str(error), setting="wlb.cluster") from error


@cache
def _shipped(name: str) -> Cluster:
    file = resources.files("wlb_titan.cost") / "clusters" / f"{name}.toml"
    with resources.as_file(file) as path:
        return _parse(path.read_text(encoding="utf-8"), f"{name}.toml", path.parent)


def _parse(text: str, name: str, folder: Path) -> Cluster:
    try:
        record = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"The cluster file {name} is not TOML: {error}.") from error
    _refuse_unknown(record, name)
    figures = {key: _figure(record, name, *key) for key in FIGURES}
    optional = {
        key: _figure(record, name, section, key) for section, key in OPTIONAL if key in record[section]
    }
    gpu = {key: value for (section, key), value in figures.items() if section == "gpu"}
    for key in ("linear_flops", "attention_flops", "attention_backward_flops"):
        if gpu[key] > gpu["peak_flops"]:
            raise PlanError(
                f"{name}: [gpu] {key} is {gpu[key]:g} FLOP/s, more than the peak of {gpu['peak_flops']:g}. "
                "Achieved rates are below the peak; check the units."
            )
    profile = record["gpu"].get("attention_profile", "")
    return Cluster(
        name=str(record.get("name", name)),
        **gpu,
        gpus_per_node=int(figures["node", "gpus"]),
        node=Link(figures["node", "bandwidth"], figures["node", "latency"]),
        network=Link(figures["network", "bandwidth"], figures["network", "latency"]),
        attention_profile=str(folder / profile) if profile else "",
        device=str(record["gpu"].get("device", "")),
        units=int(optional.get("units", 132)),
        host_bandwidth=optional.get("host_bandwidth"),
    )


def _figure(record: dict[str, Any], name: str, section: str, key: str) -> float:
    low, high, unit = (FIGURES | OPTIONAL)[section, key]
    value = record.get(section, {}).get(key)
    if value is None:
        raise PlanError(f"{name}: [{section}] {key} is missing. It is a number of {unit}.")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanError(f"{name}: [{section}] {key} is {value!r}; it must be a number of {unit}.")
    if not (math.isfinite(value) and low <= value <= high):
        raise PlanError(
            f"{name}: [{section}] {key} is {value:g} {unit}, which cannot be; it lies between {low:g} and "
            f"{high:g}. Check the unit."
        )
    if (section, key) == ("node", "gpus") and value != int(value):
        raise PlanError(f"{name}: [node] gpus is {value:g}; a node has a whole number of them.")
    return float(value)


def _refuse_unknown(record: dict[str, Any], name: str) -> None:
    known = [*FIGURES, *OPTIONAL, *TEXTS]
    for section, value in record.items():
        entries = [(section, key) for key in value] if isinstance(value, dict) else [("", section)]
        for entry in entries:
            if entry not in known:
                where = f"[{entry[0]}] {entry[1]}" if entry[0] else entry[1]
                raise PlanError(f"{name}: {where} is not known. A cluster file has {_keys()}.")


def _keys() -> str:
    sections: dict[str, list[str]] = {}
    for section, key in [*FIGURES, *OPTIONAL, *TEXTS[1:]]:
        sections.setdefault(section, []).append(key)
    return "name, " + ", ".join(f"[{section}] {' '.join(keys)}" for section, keys in sections.items())
