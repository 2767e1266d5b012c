"""What a run leaves in its dump folder: the names of its files, and what they say of it. A trace is JSON in
Chrome's trace event format, for ui.perfetto.dev and chrome://tracing.

Neither torch nor torchtitan is imported, so runs of other machines can be looked at anywhere.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from wlb_titan.arrays import Bools, Floats
from wlb_titan.errors import UserError, refusing, regular_file
from wlb_titan.files import load, save
from wlb_titan.simulator.measured import BESIDE, FLOPS, ROWS, Pass
from wlb_titan.summary import Estimate
from wlb_titan.toml.sources import read_sources

CONFIG_FILE = "config.toml"
METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
BENCH_FILE = "bench.json"  # of a bench, in a folder of its own
TRACES = "traces"
TURNS = "turns"  # the traces of a bench

COMPUTED = "processor_seconds"  # fact of a pass on a CPU: its thread's own time, without waiting
LONGEST = 1e9  # seconds
NAME = re.compile(rf"({'|'.join(ROWS)})([0-9]+)|({'|'.join(BESIDE)})")
"""Of a pass, by its kind and micro-batch (`F3`), or of what is beside them."""


@dataclass(frozen=True)
class Run:
    """A finished or running job, read from its dump folder."""

    name: str  # what tables and pictures call it
    folder: Path
    settings: Mapping[str, Any]  # its resolved configuration, by dotted key
    records: Sequence[Mapping[str, Any]]  # of metrics.jsonl, one for each logged step, in order
    validation: tuple[Floats, Floats]  # steps and losses of validation.jsonl, float64 (validations,)

    def series(self, key: str) -> tuple[Floats, Floats]:
        """Steps and values, float64 (records,), of the records that have `key`."""
        points = [(r["step"], r[key]) for r in self.records if isinstance(r.get(key), int | float)]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return np.array(steps, dtype=float), np.array(values, dtype=float)

    def mean(self, key: str) -> float | None:
        """Over the records that have `key`; None without one."""
        values = self.series(key)[1]
        return float(values.mean()) if len(values) else None

    @cached_property
    def seconds(self) -> Floats:
        """float64 (records,), wall time of the steps that each record covers."""
        return np.array([r["seconds"] * r["steps"] for r in self.records])

    @cached_property
    def tokens(self) -> Floats:
        """float64 (records,), tokens of documents trained up to each record."""
        return np.cumsum(np.array([r["tokens_per_second"] for r in self.records]) * self.seconds)

    @property
    def settled(self) -> Bools:
        """bool (records,), whose time counts: all but the first of each process, which includes the start;
        these if there are no others."""
        settled = np.array([not r.get("start") for r in self.records])
        return settled if settled.any() else ~settled

    def rate(self, key: str) -> Estimate | None:
        """Mean of a rate over the settled records' time, without its error if they are fewer than three; None
        if not all records have it."""
        steps, rates = self.series(key)
        if len(steps) < len(self.records):
            return None
        seconds = self.seconds[self.settled]
        estimate = Estimate.rate(rates[self.settled] * seconds, seconds)
        return estimate if len(seconds) > 2 else Estimate(estimate.value)

    def loss_at(self, tokens: float) -> float:
        """Mean loss of the last tenth of the run up to `tokens`; the nearest record's if that has none."""
        losses = np.array([r["loss"] for r in self.records])
        last = (self.tokens > 0.9 * tokens) & (self.tokens <= tokens * (1 + 1e-9))
        if not last.any():
            return float(losses[np.argmin(np.abs(self.tokens - tokens))])
        return float(np.average(losses[last], weights=np.diff(self.tokens, prepend=0.0)[last]))

    @property
    def slow_ranks(self) -> list[str]:
        """Those that were named in most traced steps."""
        return mostly([r["slow_ranks"] for r in self.records if "slow_ranks" in r])

    @property
    def parts(self) -> dict[str, float]:
        """Mean seconds of the settled traced steps, as of `step_parts`; empty if there is none."""
        return mean_parts(compress(self.records, self.settled))

    @property
    def peak_gib(self) -> float | None:
        """GiB, the most of any rank of a pipeline, or else of the reporting rank; None if unknown."""
        stages = [v for r in self.records for k, v in r.items() if k.startswith("peak_memory_gib/")]
        return max(stages or [r.get("memory_gib", 0.0) for r in self.records]) or None

    @cached_property
    def traced(self) -> list[int]:
        names = [path.stem.removeprefix("step-") for path in (self.folder / TRACES).glob("step-*.json")]
        return sorted(map(int, filter(str.isdecimal, names)))


def mean_parts(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """`part_seconds`, means over the records of traced steps."""
    steps = [record["part_seconds"] for record in records if "part_seconds" in record]
    names = dict.fromkeys(chain.from_iterable(steps))
    return {name: float(np.mean([step.get(name, 0.0) for step in steps])) for name in names}


def mostly(traced: Sequence[Iterable[str]]) -> list[str]:
    """The ranks that are named in most traced steps."""
    named = [name for step in traced for name in step]
    return [name for name in dict.fromkeys(named) if 2 * named.count(name) > len(traced)]


def open_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads dump folders; a run is called by its folder's name, or its path where names are the same."""
    folders = list(dict.fromkeys(Path(os.path.normpath(folder)) for folder in folders))
    names = [folder.name for folder in folders]
    unique = len(set(names)) == len(names) and all(names)
    return [open_run(folder, folder.name if unique else str(folder)) for folder in folders]


def open_run(folder: Path, name: str) -> Run:
    for file in (CONFIG_FILE, METRICS_FILE):
        if not (folder / file).is_file():
            others = sorted(path.parent.name for path in folder.glob(f"*/{METRICS_FILE}"))[:5]
            hint = "Name the dump_folder of a run that has finished its first step."
            if others:
                hint = f"These folders in it are runs: {', '.join(others)}."
            raise UserError(f"{folder}: there is no {file} in it. {hint}")
    settings = read_sources(folder / CONFIG_FILE).written()
    return Run(name, folder, settings, _records(folder / METRICS_FILE), _validation(folder / VALIDATION_FILE))


def _records(path: Path) -> list[dict[str, Any]]:
    """Those of the logged steps; a last line without its end is still being written."""
    records: list[dict[str, Any]] = []
    what = "this line is not a valid record of metrics"
    with refusing(lambda reason: UserError(f"{path}:{len(records) + 1}: {what}: {reason}.")):
        for line in regular_file(path).read_bytes().split(b"\n")[:-1]:
            records.append(_record(json.loads(line), records[-1]["step"] if records else 0))
    if not records:
        raise UserError(f"{path}: no step has been logged yet.")
    return records


def _validation(path: Path) -> tuple[Floats, Floats]:
    with refusing(lambda reason: UserError(f"{path} is not a valid record of validations: {reason}.")):
        lines = regular_file(path).read_bytes().split(b"\n")[:-1] if path.exists() else []
        points = [itemgetter("step", "loss")(json.loads(line)) for line in lines]
        steps, losses = np.array(points, dtype=float).reshape(-1, 2).T
        if not (np.isfinite(losses).all() and (np.diff(steps) > 0).all()):
            raise ValueError("losses or steps are not numbers in order")
        return steps, losses


def _record(record: dict[str, Any], last: int) -> dict[str, Any]:
    """A logged step, if it has what figures are made from and comes after step `last`."""
    step, steps, seconds, rate = itemgetter("step", "steps", "seconds", "tokens_per_second")(record)
    peaks = [value for key, value in record.items() if key.startswith(("memory_gib", "peak_memory_gib/"))]
    parts = record.get("part_seconds", {}).values()
    if not all(type(value) in (int, float) for value in (seconds, rate, record["loss"], *peaks, *parts)):
        raise ValueError("a figure is not a number")
    if type(step) is not int or type(steps) is not int or not step > last or steps < 1:
        raise ValueError(f"step {step!r} of {steps!r} steps after step {last}")
    if not all(0 < value < math.inf for value in (seconds, rate, sum(parts) if parts else 1)):
        raise ValueError(f"{rate} tokens a second in {seconds} seconds")
    return record


def traced_steps(runs: Sequence[Run]) -> dict[str, list[Pass]]:
    """The passes of the last step that all runs traced, or of each run's own last."""
    traced = [run for run in runs if run.traced]
    common = set.intersection(*(set(run.traced) for run in traced)) if traced else set()
    timelines = {}
    for run in traced:
        step = max(common or run.traced)
        timelines[run.name] = read_trace(run.folder / TRACES / f"step-{step}.json")
    return timelines


def write_trace(passes: Iterable[Pass], path: str | os.PathLike[str]) -> None:
    """Writes a file with a process for each replica and a track for each rank, in the order of their first
    passes."""
    processes: dict[str, int] = {}
    tracks: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    for each in passes:
        process = processes.setdefault(each.replica, len(processes) + 1)
        track = tracks.setdefault((each.replica, each.rank), len(tracks) + 1)
        times = {"ts": each.start * 1e6, "dur": each.seconds * 1e6}
        name = each.kind if each.kind in BESIDE else f"{each.kind}{each.micro_batch}"
        place = {"ph": "X", "name": name, "pid": process, "tid": track}
        events.append({**place, **times, "args": {"stage": each.stage, **each.facts}})
    names = [_name("process_name", number, 0, name) for name, number in processes.items()]
    names += [_name("thread_name", processes[p], number, name) for (p, name), number in tracks.items()]
    save(path, {"displayTimeUnit": "ms", "traceEvents": names + events})


def read_trace(path: str | os.PathLike[str]) -> list[Pass]:
    with refusing(lambda reason: UserError(f"{path}: this is not a trace that wlb_titan wrote: {reason}.")):
        events = load(dict[str, Any], path)["traceEvents"]
        names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
        passes = []
        for event in (e for e in events if e["ph"] == "X"):
            named, facts = NAME.fullmatch(event["name"]), dict(event["args"])
            if named is None:
                raise ValueError(f"{event['name']!r} is not a pass")
            start, seconds = event["ts"] / 1e6, event["dur"] / 1e6
            replica = str(names["process_name", event["pid"], 0])
            rank = str(names["thread_name", event["pid"], event["tid"]])
            numbers = facts.pop("stage"), int(named[2] or 0), start, seconds
            passes.append(Pass(named[1] or named[3], *numbers, replica, rank, facts=facts))
        facts_of = [(p.start, p.seconds, p.facts.get(FLOPS, 0) / LONGEST**3) for p in passes]
        if not all(0 <= fact < LONGEST for each in facts_of for fact in each):
            raise ValueError("some of its passes have no times")
        if not passes or {p.replica for p in passes} != {p.replica for p in passes if p.seconds}:
            raise ValueError("it has no passes that took time")
        return passes


def _name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}
