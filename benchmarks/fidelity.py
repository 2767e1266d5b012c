"""How far predictions are from real runs on this machine: step time, ranking of policies, peak memory.

    python benchmarks/fidelity.py                  # all that is missing; about 25 minutes on two idle cores
    python benchmarks/fidelity.py --only pp2-wlb   # one case
    python benchmarks/fidelity.py --summary        # predict anew what was measured, and run nothing

Every case is a training run of a small Llama (4 layers, width 128, 4 heads; float32) in its own processes,
one thread and one core each, and is predicted by the simulator from the very plans that it trained. The
prediction knows only what a short profile says, made first and not from these cases:

- attention: `wlb-titan profile` of this machine, and how much slower it is in training than in the profile's
  loop, where caches are warm: so that steps of whole windows are right on one process;
- passes: what a layer's pass takes without tokens, so that steps of one document of 64 tokens are right;
- linear layers: the FLOP/s at which steps of equal documents of 64 tokens, 4096 in all, are right on one
  process (element-wise operators are within it);
- communication: the time of a collective at which the same is right on two context-parallel processes, and of
  a transfer at which it is on two pipeline stages. Both carry 1 GB/s besides.

Measurements are kept in outputs/fidelity, one file a run, and the script continues where it was stopped;
delete the folder to begin anew. Results go to benchmarks/results/cpu/fidelity.json. The speed of a machine
that is shared drifts, so a probe (fidelity_probe.py) runs before and after each step, and seconds are those
of a machine that is as fast as it was during the profile. Processes beyond the cores share them: such a
step takes at least the work of all processes over the cores. Memory is what a step needs at its peak beyond
what is resident between steps: all but weights, optimizer state and rotary tables. It is measured in a run of
its own, in which freed tensors leave the process at once; where times are measured they never do.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wlb_titan.context import STRATEGIES
from wlb_titan.cost.attention_latency import KernelCost
from wlb_titan.cost.attention_profile import AttentionShape, Profile
from wlb_titan.cost.cluster import Cluster, Link, load_cluster
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import ModelShape
from wlb_titan.cost.passes import JobCost
from wlb_titan.cost.workload import workload
from wlb_titan.job import Job
from wlb_titan.memory.settings import MemorySettings
from wlb_titan.simulator.step import simulate

RUNS = Path("outputs/fidelity").absolute()
RESULTS = Path(__file__).parent / "results" / "cpu" / "fidelity.json"
PROFILE = RUNS / "attention.json"
WINDOW = 4096
MICRO_BATCHES = 4  # of a replica
LAYERS = 4
STEPS, MEMORY_STEPS = 10, 2  # measured, after WARM_UP others
WARM_UP = 2
KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**36)}
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536"}


ONE, PP, CP, DP = Degrees(), Degrees(pipeline=2), Degrees(context=2), Degrees(shard=2)


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        degrees: of parallelism.
        packing, sharding, order: the policies.
        documents: of LENGTHS.
        schedule: of the pipeline.
        checkpointing: `none` or `full`.
        window: context window in tokens.
    """

    degrees: Degrees = ONE
    packing: str = "plain"
    sharding: str = "per_sequence"
    order: str = "as_packed"
    documents: str = "mixed"
    schedule: str = "1F1B"
    checkpointing: str = "none"
    window: int = WINDOW


CALIBRATION = {
    "passes": Case(documents="equal", window=64),
    "linear": Case(documents="equal"),
    "attention": Case(documents="whole"),
    "communication": Case(CP, documents="equal"),
    "transfer": Case(PP, documents="equal"),
}
RATES = {  # where they can lie: passes a second, FLOP/s, a factor, collectives and transfers a second
    "passes": (10.0, 1e5),
    "linear": (1e8, 1e12),
    "attention": (0.3, 3.0),
    "communication": (1.0, 1e5),
    "transfer": (1.0, 1e5),
}
CASES = {
    "one-mixed": Case(),
    "one-long": Case(documents="long"),
    "one-full": Case(checkpointing="full"),
    "cp2-sequence": Case(CP, documents="long"),
    "cp2-document": Case(CP, sharding="per_document", documents="long"),
    "cp2-hybrid": Case(CP, "wlb_lazy", "hybrid", documents="long"),
    "dp2-plain": Case(DP, documents="long"),
    "dp2-wlb": Case(DP, "wlb_lazy", documents="long"),
    "pp2-plain": Case(PP, documents="long"),
    "pp2-greedy": Case(PP, "fixed_greedy", documents="long"),
    "pp2-wlb": Case(PP, "wlb_lazy", documents="long"),
    "pp2-best": Case(PP, "wlb_lazy", order="best", documents="long"),
    "pp2-gpipe": Case(PP, documents="long", schedule="GPipe"),
    "pp2cp2-plain": Case(Degrees(pipeline=2, context=2), documents="long"),
    "pp2cp2-wlb": Case(Degrees(pipeline=2, context=2), "wlb_lazy", "hybrid", documents="long"),
}
LENGTHS = {  # median and sigma of log-normal distributions, cut at the window
    "equal": (64, 0.0),
    "whole": (WINDOW, 0.0),
    "mixed": (200, 1.2),
    "long": (500, 1.5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=CASES, action="append", help="these cases, also if they are done")
    parser.add_argument("--summary", action="store_true", help="print the table and run nothing")
    arguments = parser.parse_args()
    if arguments.summary:
        report()
        return
    RUNS.mkdir(parents=True, exist_ok=True)
    for name in arguments.only or ():
        for path in RUNS.glob(f"{name}.*"):
            path.unlink()
    if not PROFILE.is_file():
        _profile()
    for name, case in CALIBRATION.items():
        _measure(name, case, "quadratic:1,1000", STEPS)
    cost_model = _cost_model(_rates())
    for name in arguments.only or CASES:
        _measure(name, CASES[name], cost_model, STEPS)
        _measure(f"{name}.memory", CASES[name], cost_model, MEMORY_STEPS, memory=True)
    report()


def report() -> None:
    """Predicts all that was measured, writes the results and prints the table."""
    rates = _rates()
    results = {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "rates": rates,
        "cases": {name: _result(name, rates) for name in CASES if _path(f"{name}.memory").is_file()},
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for name, rate in rates.items():
        print(f"{name}: {rate:.4g}")
    summary(results["cases"])


def _profile() -> None:
    """The attention profile; and in a file beside it how fast the machine was meanwhile."""
    words = [str(Path(sys.executable).with_name("wlb-titan")), "profile", "--device", "cpu"]
    words += ["--head-dim", "32", "--group", "2", "--output", str(PROFILE)]
    probe = [sys.executable, "-c", "from fidelity_probe import Probe; print(Probe().seconds())"]
    environment = {**os.environ, **KEEP_FREED, "OMP_NUM_THREADS": "1"}
    speeds = []
    for command in (probe, words, probe):
        result = subprocess.run(
            command, check=True, env=environment, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
        )
        if command is probe:
            speeds.append(float(result.stdout))
    _path("probe").write_bytes(pickle.dumps(float(np.mean(speeds))))


def _rates() -> dict[str, float]:
    """Each from its run, in turns, as each needs the others."""
    rates = {name: high for name, (_, high) in RATES.items()}
    for _ in range(4):
        for name in CALIBRATION:
            rates[name] = _rate(name, _load(name), rates)
    return rates


def _rate(name: str, run: dict[str, Any], rates: dict[str, float]) -> float:
    """The rate at which a run is predicted right, by bisection; predicted times fall with it."""
    low, high = RATES[name]
    for _ in range(50):
        middle = (low * high) ** 0.5
        predicted = _predict(CALIBRATION[name], run, {**rates, name: middle})[0]
        too_slow = np.median(predicted) > np.median(run["seconds"])
        low, high = (middle, high) if too_slow else (low, middle)
    return low


def _cost_model(rates: dict[str, float]) -> str:
    """For the packing: the quadratic through what the simulator says of two documents on one process."""
    d = np.array([256.0, WINDOW])
    job = _job(Case(), _shape(), MemorySettings(checkpointing="none"), rates)
    work = workload(JobCost(job), d.astype(np.int64))
    a = (work[1] / d[1] - work[0] / d[0]) / (d[1] - d[0])
    return f"quadratic:{a * 1e9},{(work[0] / d[0] - a * d[0]) * 1e9}"


def _result(name: str, rates: dict[str, float]) -> dict[str, Any]:
    case, run, memory_run = CASES[name], _load(name), _load(f"{name}.memory")
    predicted, _ = _predict(case, run, rates)
    _, peak = _predict(case, memory_run, rates)
    return {
        "case": asdict(case),
        "tokens": [plan.tokens for plan in run["plans"]],
        "predicted": predicted.tolist(),
        "measured": run["seconds"],
        "predicted_bytes": peak,
        "measured_bytes": max(memory_run["bytes"]),
    }


def _predict(case: Case, run: dict[str, Any], rates: dict[str, float]) -> tuple[np.ndarray, int]:
    """Seconds of each step and bytes of the rank that needs most."""
    prediction = simulate(_job(case, run["model"], run["memory"], rates), run["plans"])
    cores = len(os.sched_getaffinity(0))
    shared = prediction.busy * case.degrees.ranks / cores
    step_bytes = max(r.total - r.weights - r.optimizer - r.rotary for r in prediction.memory)
    return np.maximum(prediction.seconds, shared), step_bytes


def _job(case: Case, model: ModelShape, memory: MemorySettings, rates: dict[str, float]) -> Job:
    attention = AttentionShape.of(model, 1, "float32")
    latency = Profile.load(PROFILE).latency(attention)
    return Job(
        model=model,
        degrees=case.degrees,
        cluster=_cluster(rates, case.degrees),
        window=case.window,
        micro_batches=MICRO_BATCHES * case.degrees.data,
        sharding=STRATEGIES.configure(case.sharding),
        dtype="float32",
        attention=replace(
            latency,
            forward=_in_training(latency.forward, rates),
            backward=_in_training(latency.backward, rates),
        ),
        schedule=case.schedule,
        overlap=False,  # a core that communicates does nothing else
        memory=memory,
    )


def _in_training(kernel: KernelCost, rates: dict[str, float]) -> KernelCost:
    """A profiled kernel in training, with what a layer's pass takes without tokens as its launch."""
    return replace(kernel.slower(1 / rates["attention"]), launch=1 / rates["passes"])


def _cluster(rates: dict[str, float], degrees: Degrees) -> Cluster:
    """This machine; ranks with collectives make up a node, and stages communicate over the network."""
    return replace(
        load_cluster("cpu"),
        peak_flops=1e15,
        linear_flops=rates["linear"],
        memory_bandwidth=1e15,
        gpus_per_node=degrees.ranks // degrees.pipeline,
        node=Link(1e9, 1 / rates["communication"]),
        network=Link(1e9, 1 / rates["transfer"]),
    )


def _shape() -> ModelShape:
    return ModelShape(
        layers=LAYERS, hidden=128, heads=4, kv_heads=2, head_dim=32, feed_forward=384, vocabulary=512
    )


def _path(name: str) -> Path:
    return RUNS / f"{name}.pickle"


def _load(name: str) -> dict[str, Any]:
    """Of a run that was measured: seconds of each step, peak bytes of each rank, plans, shape and settings.

    Seconds are those of a machine as fast as it was for the profile.
    """
    record: dict[str, Any] = pickle.loads(_path(name).read_bytes())
    speed = pickle.loads(_path("probe").read_bytes())
    record["seconds"] = [s * speed / p for s, p in zip(record["seconds"], record["probe"], strict=True)]
    return record


def _measure(name: str, case: Case, cost_model: str, steps: int, *, memory: bool = False) -> None:
    """Runs a case in its own processes, unless it has been run."""
    if _path(name).is_file():
        return
    environment = {**os.environ, **(RETURN_FREED if memory else KEEP_FREED), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += [f"--nproc_per_node={case.degrees.ranks}", str(Path(__file__).with_name("fidelity_run.py"))]
    spec = json.dumps({**asdict(case), "cost_model": cost_model, "steps": steps, "memory": memory})
    result = subprocess.run([*words, spec, str(_path(name))], env=environment, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(result.stderr[-4000:])
    print(name, "done", flush=True)


def summary(cases: dict[str, Any]) -> None:
    """Prints predicted beside measured, mean errors, and how many pairs of policies are ranked right."""
    print(
        f"{'case':14}{'predicted':>11}{'measured':>11}{'error':>8}{'predicted':>12}{'measured':>12}{'error':>8}"
    )
    errors, memory_errors = [], []
    for name, run in cases.items():
        predicted, measured = np.mean(run["predicted"]), np.mean(run["measured"])
        errors.append(predicted / measured - 1)
        memory_errors.append(run["predicted_bytes"] / run["measured_bytes"] - 1)
        print(
            f"{name:14}{predicted:9.3f} s{measured:9.3f} s{errors[-1]:+8.1%}"
            f"{run['predicted_bytes'] / 2**20:8.0f} MiB{run['measured_bytes'] / 2**20:8.0f} MiB"
            f"{memory_errors[-1]:+8.1%}"
        )
    if not errors:
        return
    time_error, memory_error = np.abs(errors).mean(), np.abs(memory_errors).mean()
    print(f"mean absolute error: step time {time_error:.1%}, memory {memory_error:.1%}")
    right, pairs = ranked(cases)
    print(
        f"pairs of policies on the same ranks and documents, 3 % apart or more: {right} of {pairs} in order"
    )


def ranked(cases: dict[str, Any], apart: float = 0.03) -> tuple[int, int]:
    """How many pairs of policies are predicted in the order in which they were measured, and of how many."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for name, run in cases.items():
        rates = [sum(run["tokens"]) / sum(run[kind]) for kind in ("predicted", "measured")]
        groups.setdefault(name.split("-")[0], []).append((rates[0], rates[1]))
    right = pairs = 0
    for name, rates in groups.items():
        if name == "one":  # other documents and checkpointing, not other policies
            continue
        for i, (p, m) in enumerate(rates):
            for q, n in rates[:i]:
                if abs(m / n - 1) >= apart:
                    pairs += 1
                    right += (p > q) == (m > n)
    return right, pairs


if __name__ == "__main__":
    main()
