"""The profile of a device: measured times, coefficients of the attention, and the JSON file that keeps them.

    {"schema": 2, "device": "NVIDIA H200", "units": 132, "software": "torch 2.11.0, wlb_titan 0.1.0",
     "entries": [
       {"head_dim": 128, "group": 8, "dtype": "bfloat16", "pass": "forward", "implementation": "gluon",
        "tiles_of": "queries", "query_tile": 128, "key_block": 128, "merge_keys": 1024, "heads_per_tile": 1,
        "launch": 2.1e-05, "key": 0.0, "query": 0.0, "segment": 0.0, "tile": 1.4e-06, "block": 1.5e-06,
        "masked": 3.0e-07, "points": [[128, 128, 264, 32, 0.00012], ...]}],
     "linear": {"dtype": "bfloat16", "ranks": 8, "matrices": [[FLOPs, seconds], ...], "elements": ..., ...}}

`wlb-titan profile` writes it; "v_head_dim" is there besides where values have another head dim, and "linear"
(`linear_profile`) is missing in profiles of attention alone. Times are seconds; a point is q_len, kv_len,
segments, heads, measured time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wlb_titan.arrays import Floats
from wlb_titan.cost.attention_fit import COEFFICIENTS, Point, fit, predict, tilings
from wlb_titan.cost.attention_latency import AttentionLatency, KernelCost, KeyTiling, Tiling
from wlb_titan.cost.cluster import Cluster
from wlb_titan.cost.linear_profile import LinearProfile
from wlb_titan.errors import PlanError

if TYPE_CHECKING:
    from wlb_titan.cost.models import ModelShape

SCHEMA = 2
PASSES = ("forward", "backward")
TILES_OF = {"queries": Tiling, "keys": KeyTiling}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one layer on one device. The default is the paper's 7B model on one GPU.

    Attributes:
        head_dim: head dim of queries and keys.
        heads: query heads on the device: those of the model over the tensor-parallel degree.
        group: query heads that share a key head.
        dtype: data type of queries and keys, as torch names it.
        v_head_dim: head dim of values, where it is another.
        windows: (keys, share of the layers) for each sliding window.
    """

    head_dim: int = 128
    heads: int = 32
    group: int = 1
    dtype: str = "bfloat16"
    v_head_dim: int | None = None
    windows: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, model: ModelShape, tensor_parallel: int, dtype: str = "bfloat16") -> AttentionShape:
        """The attention of one layer of a model on one tensor-parallel rank."""
        return cls(
            head_dim=model.head_dim,
            heads=max(model.heads // tensor_parallel, 1),
            group=model.heads // model.kv_heads,
            dtype=dtype,
            v_head_dim=None if model.v_head_dim == model.head_dim else model.v_head_dim,
            windows=tuple((window, layers / model.layers) for window, layers in model.windows),
        )

    @property
    def dims(self) -> str:
        """Head dims as `wlb-titan profile` takes them: 128, or 192/128 where values have another."""
        return head_dims_text(self.head_dim, self.v_head_dim)


@dataclass(frozen=True, slots=True)
class Entry:
    """One pass of one kind of attention.

    Attributes:
        head_dim, group, dtype, v_head_dim: as in `AttentionShape`.
        direction: "forward" or "backward"; "pass" in the file.
        cost: the coefficients fitted to the points.
        points: the measurements.
        implementation: implementation that was measured: "gluon", "triton" or "reference".
    """

    head_dim: int
    group: int
    dtype: str
    direction: str
    cost: KernelCost
    points: tuple[Point, ...]
    implementation: str
    v_head_dim: int | None = None

    @property
    def dims(self) -> str:
        """Head dims, as in `AttentionShape`."""
        return head_dims_text(self.head_dim, self.v_head_dim)

    def errors(self, units: int) -> Floats:
        """float64 (points,), predicted over measured time minus 1."""
        return predict(self.cost, self.points, units) / [point.seconds for point in self.points] - 1

    def to_json(self) -> dict[str, Any]:
        costs = {name: getattr(self.cost, name) for name in COEFFICIENTS}
        return {
            "head_dim": self.head_dim,
            **({} if self.v_head_dim is None else {"v_head_dim": self.v_head_dim}),
            "group": self.group,
            "dtype": self.dtype,
            "pass": self.direction,
            "implementation": self.implementation,
            "tiles_of": next(name for name, kind in TILES_OF.items() if type(self.cost.tiling) is kind),
            **asdict(self.cost.tiling),
            **costs,
            "points": [list(point) for point in self.points],
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Entry:
        tiling = TILES_OF[record["tiles_of"]](**{name: int(record[name]) for name in Tiling.__slots__})
        costs = {name: float(record[name]) for name in COEFFICIENTS}
        if record["pass"] not in PASSES:
            raise ValueError(f"pass {record['pass']!r} is neither forward nor backward")
        return cls(
            head_dim=int(record["head_dim"]),
            group=int(record["group"]),
            dtype=str(record["dtype"]),
            direction=record["pass"],
            cost=KernelCost(tiling, **costs),
            points=tuple(
                Point(int(q_len), int(kv_len), int(segments), int(heads), float(seconds))
                for q_len, kv_len, segments, heads, seconds in record["points"]
            ),
            implementation=str(record["implementation"]),
            v_head_dim=int(record["v_head_dim"]) if "v_head_dim" in record else None,
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured on one device.

    Attributes:
        device: its name.
        units: programs that it runs side by side.
        software: versions that were measured.
        entries: one for each pass and kind of attention.
        linear: everything else; None if it was not measured.
    """

    device: str
    units: int
    software: str
    entries: tuple[Entry, ...]
    linear: LinearProfile | None = None

    def latency(self, shape: AttentionShape) -> AttentionLatency:
        """The latency model of an attention that was measured.

        Raises:
            PlanError: it was not; the message names what is missing and what there is.
        """
        wanted = {"head dim": shape.dims, "GQA group": shape.group, "dtype": shape.dtype}
        found = list(self.entries)
        for name, value in wanted.items():
            attribute = {"head dim": "dims", "GQA group": "group"}.get(name, name)
            there = dict.fromkeys(getattr(entry, attribute) for entry in found)
            found = [entry for entry in found if getattr(entry, attribute) == value]
            if not found:
                raise PlanError(
                    f"The profile of {self.device} has no attention of {name} {value}, only of "
                    f"{', '.join(map(str, there)) or 'none'}"
                    f"{_given(wanted, name)}. Measure it: {_command(shape)}"
                )
        by_pass = {entry.direction: entry.cost for entry in found}
        for direction in PASSES:
            if direction not in by_pass:
                raise PlanError(
                    f"The profile of {self.device} has no {direction} pass for head dim {shape.dims}. "
                    f"Measure it: {_command(shape)}"
                )
        points = [point for entry in found for point in entry.points]
        return AttentionLatency(
            by_pass["forward"],
            by_pass["backward"],
            self.units,
            shape.heads,
            f"profile of {self.device}",
            measured_to=max((point.kv_len for point in points), default=None),
            windows=shape.windows,
            group=shape.group,
        )

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster at the measured rates; as it is where only attention was measured."""
        return cluster if self.linear is None else self.linear.on(cluster)

    def save(self, path: Path) -> None:
        """Writes the JSON file; one line for each entry."""
        head = {"schema": SCHEMA, "device": self.device, "units": self.units, "software": self.software}
        entries = ",\n".join(json.dumps(entry.to_json()) for entry in self.entries)
        path.parent.mkdir(parents=True, exist_ok=True)
        linear = "" if self.linear is None else f',\n"linear": {json.dumps(self.linear.to_json())}'
        path.write_text(f'{json.dumps(head)[:-1]}, "entries": [\n{entries}\n]{linear}}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Reads what `save` wrote.

        Raises:
            PlanError: there is no such file, or it is no profile of this schema.
        """
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"The profile {path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise PlanError(f"The profile {path} is not JSON: {error}.") from error
        schema = record.get("schema") if isinstance(record, dict) else None
        if schema != SCHEMA:
            raise PlanError(
                f"The profile {path} has schema {schema}, and this wlb_titan reads schema {SCHEMA}. "
                "Measure it anew with `wlb-titan profile`."
            )
        try:
            return cls(
                device=str(record["device"]),
                units=int(record["units"]),
                software=str(record["software"]),
                entries=tuple(Entry.from_json(entry) for entry in record["entries"]),
                linear=LinearProfile.from_json(record["linear"]) if "linear" in record else None,
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise PlanError(f"The profile {path} is damaged: {type(error).__name__} {error}.") from error


def fitted(
    shape: AttentionShape,
    cases: Sequence[tuple[int, int, int]],
    seconds: Floats,
    units: int,
    implementations: tuple[str, str],
) -> list[Entry]:
    """The entries of both passes that describe measured times best.

    Args:
        shape: what was measured; its heads are those of each case.
        cases: (q_len, kv_len, segments) of each case.
        seconds: float64 (cases, 2), of the forward and of the backward.
        units: programs that the device runs side by side.
        implementations: implementations of forward and backward, as `attention_fit.tilings` names them.
    """
    entries = []
    for number, (direction, name) in enumerate(zip(PASSES, implementations, strict=True)):
        times = seconds[:, number].tolist()
        points = tuple(Point(*case, shape.heads, time) for case, time in zip(cases, times, strict=True))
        cost = fit(points, units, tilings(name, shape.group)[number]).cost
        entries.append(
            Entry(shape.head_dim, shape.group, shape.dtype, direction, cost, points, name, shape.v_head_dim)
        )
    return entries


def head_dims_text(head_dim: int, v_head_dim: int | None) -> str:
    """Head dim of queries and keys and, if it is another, that of values."""
    return str(head_dim) if v_head_dim in (None, head_dim) else f"{head_dim}/{v_head_dim}"


def _given(wanted: dict[str, Any], last: str) -> str:
    names: Iterable[str] = list(wanted)[: list(wanted).index(last)]
    parts = [f"{name} {wanted[name]}" for name in names]
    return f" (for {', '.join(parts)})" if parts else ""


def _command(shape: AttentionShape) -> str:
    return (
        f"wlb-titan profile --head-dim {shape.dims} --group {shape.group} --dtype {shape.dtype} --output FILE"
    )
