"""A finished or running job as its dump folder tells it: configuration, metrics, traces. Nothing is imported
that training needs, so runs of other machines can be looked at anywhere."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from wlb_titan.arrays import Bools, Floats
from wlb_titan.config.sources import leaves, read_sources
from wlb_titan.errors import UserError
from wlb_titan.simulator.trace import Span, read_trace, replayed_seconds
from wlb_titan.summary import Estimate

CONFIG, METRICS, VALIDATION, TRACES = "config.toml", "metrics.jsonl", "validation.jsonl", "traces"
"""What wlb_titan.runtime writes into a dump folder."""


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        name: what tables and pictures call it.
        settings: its resolved configuration, by dotted key.
        records: records of metrics.jsonl, one a logged step, by rising step.
        validations: records of validation.jsonl, as far as there is one.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    validations: Sequence[Mapping[str, Any]]

    def series(self, key: str) -> tuple[Floats, Floats]:
        """Steps and values, float64 (records,), of the records that have `key`."""
        found = [(r["step"], r[key]) for r in self.records if isinstance(r.get(key), int | float)]
        steps, values = zip(*found, strict=True) if found else ((), ())
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
        """bool (records,), whose time counts: all but the first of each process, which has the start in it;
        these if there are no others."""
        settled = np.array([not r.get("start") for r in self.records])
        return settled if settled.any() else ~settled

    def rate(self, key: str) -> Estimate | None:
        """Mean over the settled records' time of a record's rate; None where not all records have it. Fewer
        than three tell no error."""
        steps, rates = self.series(key)
        if len(steps) < len(self.records):
            return None
        seconds = self.seconds[self.settled]
        found = Estimate.rate(rates[self.settled] * seconds, seconds)
        return found if len(seconds) > 2 else Estimate(found.value)

    @cached_property
    def replayed(self) -> tuple[Floats, Floats]:
        """Traced steps that were logged by themselves, float64 each: the model's TFLOPs, and the seconds
        that their measured passes are worth with a device for each process; empty where that is not known."""
        alone = {r["step"]: r for r in self.records if r["steps"] == 1}
        found = []
        for step in self.traced:
            record = alone.get(step)
            if record is None or "model_tflops" not in record or not (spans := self.trace(step)):
                continue
            if (seconds := replayed_seconds(spans)) is not None:
                found.append((record["model_tflops"] * record["seconds"], seconds))
        flops, taken = zip(*found, strict=True) if found else ((), ())
        return np.array(flops, dtype=float), np.array(taken, dtype=float)

    def loss_at(self, tokens: float) -> float:
        """Mean loss of the last tenth of the run up to `tokens`; the nearest record's where it has none."""
        losses = np.array([r["loss"] for r in self.records])
        last = (self.tokens > 0.9 * tokens) & (self.tokens <= tokens * (1 + 1e-9))
        if not last.any():
            return float(losses[np.argmin(np.abs(self.tokens - tokens))])
        return float(np.average(losses[last], weights=np.diff(self.tokens, prepend=0.0)[last]))

    @property
    def peak_gib(self) -> float | None:
        """GiB at most, of any rank of a pipeline or else of the reporting rank; None if unknown."""
        stages = [v for r in self.records for k, v in r.items() if k.startswith("peak_memory_gib/")]
        return max(stages or [r.get("memory_gib", 0.0) for r in self.records]) or None

    @cached_property
    def traced(self) -> list[int]:
        """Steps that have a trace."""
        names = [path.stem.removeprefix("step-") for path in (self.folder / TRACES).glob("step-*.json")]
        return sorted(map(int, filter(str.isdecimal, names)))

    def trace(self, step: int) -> list[Span]:
        """The trace of a step; empty, with a warning, where it cannot be read."""
        try:
            return read_trace(self.folder / TRACES / f"step-{step}.json")
        except UserError as error:
            warnings.warn(f"{error} It is left out.", stacklevel=2)
            return []


def open_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads dump folders; a run is called by its folder's name, or by the path where names are the same."""
    folders = list(dict.fromkeys(Path(os.path.normpath(folder)) for folder in folders))
    names = [folder.name for folder in folders]
    unique = len(set(names)) == len(names) and all(names)
    return [open_run(folder, folder.name if unique else str(folder)) for folder in folders]


def open_run(folder: Path, name: str) -> Run:
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder. Name a run's dump_folder.")
    for file, what in ((CONFIG, "the run's configuration"), (METRICS, "its metrics")):
        if not (folder / file).is_file():
            others = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))[:5]
            hint = f" These folders in it are runs: {', '.join(others)}." if others else ""
            if file == METRICS and not hint:
                hint = " The run has not finished its first step, or did not get that far."
            raise UserError(f"{folder}: {file}, {what}, is missing.{hint}")
    records = _json_lines(folder / METRICS, ("step", "steps", "loss", "seconds", "tokens_per_second"))
    if not records:
        raise UserError(f"{folder / METRICS}: no step has been logged yet.")
    validation = folder / VALIDATION
    validations = _json_lines(validation, ("step", "loss")) if validation.is_file() else []
    return Run(name, folder, _settings(folder / CONFIG), records, validations)


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """By dotted key the values of all runs, for the settings that are not the same in all; None: not set.

    The dump folder is left out, which must differ.
    """
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "dump_folder")
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def _settings(path: Path) -> dict[str, Any]:
    sources = read_sources(path)
    settings = {".".join(keys): leaf.value for layer in sources.layers for keys, leaf in leaves(layer)}
    return settings if sources.base is None else {"base": sources.base.value, **settings}


def _json_lines(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Objects that have all of `keys`; a last line without its end is one that is being written."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the file cannot be read: {error}.") from error
    records = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: this is not JSON: {error}.") from error
        missing = [key for key in keys if not isinstance(record, dict) or key not in record]
        if missing:
            raise UserError(f"{path}:{number}: {', '.join(missing)} is missing; is this a run's metrics?")
        records.append(record)
    return records
