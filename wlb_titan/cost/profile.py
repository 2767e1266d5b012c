"""The times that predictions use: a device's profile, or else those of our kernels on H100.

`wlb-titan profile` measures a device and writes its profile as a JSON file:

    {"schema": 3, "device": "NVIDIA H200", "units": 132, "software": "torch 2.11.0, wlb_titan 0.1.0",
     "entries": [
       {"head_dim": 128, "group": 8, "dtype": "bfloat16", "pass": "forward", "implementation": "gluon",
        "tiles_of": "queries", "query_tile": 128, "key_block": 128, "merge_keys": 1024, "heads_per_tile": 1,
        "launch": 2.1e-05, "key": 0.0, "query": 0.0, "segment": 0.0, "tile": 1.4e-06, "block": 1.5e-06,
        "masked": 3.0e-07, "points": [[128, 128, 264, 32, 0.00012], ...]}],
     "linear": {"dtype": "bfloat16", "linear_flops": 6.1e14, "memory_bandwidth": 2.4e12},
     "layer": [1e-4, 2e-4]}

"v_head_dim" is null where values have the same head dim, and "linear" in profiles of attention alone. Times
are seconds; a point is q_len, kv_len, segments, heads, measured time.

All else follows lines of fixed + size x each seconds: FLOPs of matrix products, bytes that element-wise
operators read and write. Planning takes the slopes, as rates; launches are short beside micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt

from wlb_titan.arrays import Floats
from wlb_titan.cost.attention_kernels import OTHERS, SLOWER, Point, fit, hopper, non_negative, predict, taken
from wlb_titan.cost.attention_latency import AttentionLatency, KernelCost, KeyTiling, Tiling
from wlb_titan.cost.cluster import Cluster, load_cluster
from wlb_titan.cost.models import ModelShape, Windows
from wlb_titan.errors import PlanError, refusing, shell_line, warn
from wlb_titan.files import checked, load, save

SCHEMA = 3
PASSES = ("forward", "backward")
TILES_OF = {"queries": Tiling, "keys": KeyTiling}

Seconds = Annotated[float, Ge(0)]
Line = Sequence[Sequence[float]]  # (size, seconds) of each measurement; at least two sizes


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention on one device; by default the paper's 7B model on one GPU."""

    head_dim: int = 128  # of queries and keys
    heads: int = 32  # query heads on the device: the model's over the tensor-parallel degree
    group: int = 1  # query heads that share a key head
    dtype: str = "bfloat16"  # as torch names it
    v_head_dim: int | None = None  # of values, where it differs
    windows: Windows = ()

    @classmethod
    def of(cls, model: ModelShape, tensor_parallel: int, dtype: str = "bfloat16") -> AttentionShape:
        return cls(
            head_dim=model.head_dim,
            heads=max(model.heads // tensor_parallel, 1),
            group=model.heads // model.kv_heads,
            dtype=dtype,
            v_head_dim=None if model.v_head_dim == model.head_dim else model.v_head_dim,
            windows=model.window_shares(0, model.layers),
        )

    @property
    def both_dims(self) -> tuple[int, int]:
        """Head dim of queries and keys, and of values."""
        return self.head_dim, self.v_head_dim or self.head_dim

    @property
    def kind(self) -> str:
        """The part that a profile must match."""
        values = "" if self.v_head_dim is None else f"/{self.v_head_dim}"
        return f"head dim {self.head_dim}{values}, GQA group {self.group}, {self.dtype}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One pass of one kind of attention; sizes as in `AttentionShape`."""

    head_dim: int
    group: int
    dtype: str
    direction: str  # "forward" or "backward"; "pass" in the file
    cost: KernelCost  # fitted to the points
    points: tuple[Point, ...]
    implementation: str  # that was measured, of kernels/implementations.py
    v_head_dim: int | None = None

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.head_dim, group=self.group, dtype=self.dtype, v_head_dim=self.v_head_dim)

    def errors(self, units: int) -> Floats:
        """float64 (points,), predicted over measured time minus 1."""
        return predict(self.cost, self.points, units) / [point.seconds for point in self.points] - 1


def _flat(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry as the file has it."""
    cost = entry.pop("cost")
    return {"pass": entry.pop("direction"), **entry, **cost.pop("tiling"), **cost}


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """An entry of a file as `Entry` has it."""
    names = {kind: [field.name for field in fields(kind)] for kind in (Tiling, KernelCost)}
    if missing := [name for name in ("pass", *names[Tiling]) if name not in flat]:
        raise ValueError(f"an entry lacks {', '.join(missing)}")
    tiling, cost = ({name: flat.pop(name) for name in of if name in flat} for of in names.values())
    return {"direction": flat.pop("pass"), "cost": cost | {"tiling": tiling}, **flat}


@dataclass(frozen=True, slots=True)
class LinearProfile:
    """All but attention, on one device. Rates are fitted before they are saved, as least squares end in other
    bits on other processors, and all ranks plan alike."""

    dtype: str  # of the operands, as torch names it
    linear_flops: Annotated[float, Gt(0)]  # FLOP/s of matrix products
    memory_bandwidth: Annotated[float, Gt(0)]  # bytes/s of element-wise operators


def rate(points: Line) -> float:
    """Units a second, beside a fixed part of the seconds, by least squares of relative errors.

    Seconds that do not grow with the units, as on a busy machine, tell only that the rate is at least the
    best one seen, which it then is. Example: 1 second and 2 seconds a unit:

        >>> round(rate([(1, 3), (2, 5), (4, 9)]), 6)
        0.5
    """
    sizes, seconds = np.array(points, dtype=np.float64).T
    _, seconds_each = non_negative(np.stack([1 / seconds, sizes / seconds], axis=1), np.ones(len(sizes)))
    return float(1 / seconds_each if seconds_each else (sizes / seconds).max())


@dataclass(frozen=True, slots=True)
class Profile:
    device: str
    units: Annotated[int, Gt(0)]  # programs that it runs side by side
    software: str  # versions
    entries: tuple[Entry, ...]  # one for each pass and kind of attention
    linear: LinearProfile | None = None  # None where only attention was measured
    layer: tuple[Seconds, Seconds] = (0.0, 0.0)
    """Seconds of a layer's forward and backward pass whatever its tokens: launches, Python."""
    experts: Annotated[float, Ge(1)] = 1.0
    """Times their share of the tokens that the busiest rank's experts get, in the mean layer."""

    def latency(self, shape: AttentionShape) -> AttentionLatency:
        entries = {entry.direction: entry for entry in self.entries if entry.shape.kind == shape.kind}
        if not entries:
            kinds = dict.fromkeys(entry.shape.kind for entry in self.entries)
            raise PlanError(
                f"The profile of {self.device} has no attention of {shape.kind}; it has {'; '.join(kinds)}. "
                "Measure that of your job's file: `wlb-titan profile FILE --output PROFILE`."
            )
        return AttentionLatency(
            entries["forward"].cost,
            entries["backward"].cost,
            self.units,
            shape.heads,
            f"profile of {self.device}",
            measured_to=max((p.kv_len for entry in entries.values() for p in entry.points), default=None),
            windows=shape.windows,
            group=shape.group,
        )

    def save(self, path: Path) -> None:
        record = asdict(self)
        save(path, {"schema": SCHEMA, **record, "entries": [_flat(entry) for entry in record["entries"]]})

    @classmethod
    def load(cls, path: Path, setting: str = "") -> Profile:
        what = f"{path} is not a profile that this wlb_titan reads"
        again = f"Measure it again with {shell_line('profile')}."
        with refusing(lambda reason: PlanError(f"{what}: {reason}. {again}", setting=setting)):
            record = load(dict[str, Any], path)
            if (schema := record.pop("schema")) != SCHEMA:
                raise ValueError(f"its schema is {schema}, not {SCHEMA}")
            record["entries"] = list(map(_nested, record["entries"]))
            profile: Profile = checked(cls, record)
            for entry in profile.entries:
                profile.latency(entry.shape)
                errors = entry.errors(profile.units) if entry.points else 0.0
                if not np.all(np.isfinite(errors) & (errors > -1)):
                    raise ValueError("some of its figures are not times or sizes")
            return profile


def fitted(
    shape: AttentionShape,
    cases: Sequence[tuple[int, int, int]],
    seconds: Floats,
    units: int,
    kernels: Sequence[tuple[str, Tiling]],
) -> list[Entry]:
    """The entries of both passes, fitted to `seconds`, float64 (cases, 2), of forward and backward. A case is
    (q_len, kv_len, segments); `kernels` has the implementation of each pass, and how it cuts its work."""
    entries = []
    for number, (direction, (name, tiling)) in enumerate(zip(PASSES, kernels, strict=True)):
        times = seconds[:, number].tolist()
        points = tuple(Point(*case, shape.heads, time) for case, time in zip(cases, times, strict=True))
        cost = fit(points, units, tiling)
        entries.append(
            Entry(shape.head_dim, shape.group, shape.dtype, direction, cost, points, name, shape.v_head_dim)
        )
    return entries


def _named(cluster: Cluster, profile: str) -> Profile | None:
    """The profile that [wlb.context] or, where that is empty, the cluster names; None if neither does."""
    if profile:
        return Profile.load(Path(profile), "context.profile")
    return Profile.load(Path(cluster.attention_profile), "wlb.cluster") if cluster.attention_profile else None


def measured_cluster(cluster: Cluster, profile: str) -> Cluster:
    """The cluster at the rates of the profile that [wlb.context] or the cluster names, where it has any."""
    measured = _named(cluster, profile)
    if measured is None or (linear := measured.linear) is None:
        return cluster
    cluster = replace(cluster, experts=measured.experts)
    flops, bandwidth = linear.linear_flops, linear.memory_bandwidth
    cluster = replace(cluster, linear_flops_float8=cluster.linear_flops_float8 * flops / cluster.linear_flops)
    return replace(cluster, layer=measured.layer, linear_flops=flops, memory_bandwidth=bandwidth)


def configured_latency(
    cluster: Cluster, shape: AttentionShape, implementation: str = "auto", profile: str = ""
) -> AttentionLatency:
    """One layer's attention by [wlb.context] `profile` or, where it is empty, by the cluster's profile or,
    where that lacks it, by our kernels on an H100 scaled to the cluster's rates."""
    if measured := _named(cluster, profile):
        try:
            return measured.latency(shape)
        except PlanError as error:
            if profile:
                raise PlanError(str(error), setting="context.profile") from error
            warn(
                f"{error} Until then its times are those of H100, scaled to the attention rates of "
                f"{cluster.name}."
            )
    ours = hopper(sum(shape.both_dims) / 2, shape.heads, group=shape.group)
    base = load_cluster("h100_roce")
    units = cluster.units / base.units
    forward = units * base.attention_flops / cluster.attention_flops
    backward = units * base.attention_backward_flops / cluster.attention_backward_flops
    source = ours.source if forward == backward == 1 else f"{ours.source}, scaled to {cluster.name}"
    if cluster.kind != "cpu":
        family = int(cluster.capability)
        kernels = taken(implementation, shape.both_dims, family)
        slower = SLOWER.get(family, OTHERS)
        forward, backward = forward * slower[kernels[0]][0], backward * slower[kernels[1]][1]
        source += f", {kernels[0].title()}'s forward and {kernels[1].title()}'s backward pass"
    return replace(
        ours,
        forward=ours.forward.slower(forward),
        backward=ours.backward.slower(backward),
        units=cluster.units,
        windows=shape.windows,
        source=source,
    )
