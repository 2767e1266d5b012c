"""Dump folders of runs."""

import json

from wlb_titan.runs import write_trace
from wlb_titan.simulator.measured import Pass

CONFIG = 'base = "llama3_debug" # a.toml:1\ndump_folder = "{name}"\n[wlb]\npolicy = "{policy}"\n'
FIRST, SECOND = ("dp 0", "pp 0"), ("dp 0", "pp 1")
PASSES = [Pass("F", 0, 0, 0, 1, *FIRST, facts={"tokens": 8}), Pass("B", 1, 0, 1, 1, *SECOND)]
BESIDE = [Pass("optimizer", 0, 0, 2, 0.5, *place, facts={"flops": 4e12}) for place in (FIRST, SECOND)]


def record(step, loss=2.0, seconds=2.0, rate=100.0, steps=1, **more):
    start = {"start": True} if step == steps else {}  # the first line of a run
    figures = {"loss": loss, "seconds": seconds, "tokens_per_second": rate}
    return {"step": step, "steps": steps, **figures, **start, **more}


def write_run(path, records, policy="plain", config=CONFIG, traced=()):
    """A run with these lines of metrics, and with `PASSES` and `BESIDE` as the traces of some steps."""
    (path / "traces").mkdir(parents=True)
    (path / "config.toml").write_text(config.format(name=path.name, policy=policy))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    for step in traced:
        write_trace(PASSES + BESIDE, path / "traces" / f"step-{step}.json")
    return path
