"""How fast is the attention on this GPU, beside PyTorch's own and FlashAttention-4?

    python benchmarks/attention.py                                   # at most 9 minutes; again to go on
    python benchmarks/attention.py --stages warm turns               # of: warm turns time grid
    python benchmarks/attention.py --table                           # only print what has been found
    TRITON_INTERPRET=1 python benchmarks/attention.py --device cpu   # a rehearsal, tiny, interpreted

Whether it is right, `make test-gpu` shows before. First the device's ceilings; then all kernels are compiled,
many processes at once; then cases are timed, the most telling shapes first: ours in turns with
FlashAttention-4's if it is installed, twice, which shows the noise, and each by itself; last the grid that
the latency model is fitted to, and the packs that check the fit (attention_cases.py). Each job is one
implementation and shape (heads and head dims) in a process of its own (attention_job.py), killed after
`--limit` seconds: a kernel that hangs or breaks the GPU costs its own job. Every row is appended to
<output>/attention.jsonl as soon as it is there, and a second call does only what is missing; `--retry` does
again what ended badly. TFLOP/s count the operations of the real mask, 2 x pairs x heads x (D + Dv) forward,
2.5 times that backward.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

from attention_job import FA4, PEERS
from attention_peers import has_fa4

from wlb_titan.commands.profile import ROUNDS

JOB = Path(__file__).with_name("attention_job.py")
OURS = ("gluon", "triton")
WORKERS = 14  # processes that compile at a time
TIME_SHAPES = [[32, 4, 128, 128], [32, 32, 128, 128], [32, 4, 64, 64], [16, 16, 192, 128]]
GRID_SHAPES = [[32, 4, 128, 128], [32, 32, 128, 128]]
KEYS = ("kind", "implementation", "shape", "part")  # of a job; parts: rounds of the grid
TINY = {"shapes": [[2, 1, 64, 64]], "groups": "ac", "scale": 256}  # of a rehearsal


def supports(implementation: str, shape: list[int]) -> bool:
    return implementation != "gluon" or set(shape[2:]) <= {64, 128}


def jobs(stages: list[str], device: str) -> Iterator[dict]:
    """All jobs, in the order of their worth."""
    tiny = device != "cuda"
    time_shapes, grid_shapes, rounds = TIME_SHAPES, GRID_SHAPES, ROUNDS
    if tiny:
        time_shapes, grid_shapes, rounds = TINY["shapes"], TINY["shapes"], 1
    common = {"device": device, "scale": TINY["scale"] if tiny else 1}
    yield {"kind": "ceiling", "implementation": "", "shape": [0, 0, 0, 0]} | common
    for shape in time_shapes if "warm" in stages else ():
        for name in OURS:
            if supports(name, shape):
                yield {"kind": "warm", "implementation": name, "shape": shape} | common
    for shape in time_shapes if "turns" in stages else ():
        ours = ("gluon",) if supports("gluon", shape) and not tiny else ("triton",)
        others = () if tiny else ("triton", "cuDNN dense", *(FA4 if has_fa4() else ()))
        names = list(dict.fromkeys((*ours, *others)))
        groups = TINY["groups"] if tiny else "abcd"
        job = {"implementation": ours[0], "names": names, "groups": groups}
        yield {"kind": "turns", "shape": shape} | job | common
    for shape in time_shapes if "time" in stages else ():
        for name in (*OURS, *(() if tiny else PEERS)):
            if supports(name, shape):
                groups = TINY["groups"] if tiny else "abcde"
                yield {"kind": "time", "implementation": name, "shape": shape, "groups": groups} | common
    for shape in grid_shapes if "grid" in stages else ():
        for name in OURS:
            job = {"implementation": name, "shape": shape} | common
            if supports(name, shape):
                yield from ({"kind": "grid", "part": part} | job for part in range(rounds))
                yield {"kind": "packs"} | job


class Results:
    """The rows found so far, in a file of JSON lines."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        self.rows = [json.loads(line) for line in lines if line.endswith("\n")]
        if lines and not lines[-1].endswith("\n"):
            self.write()  # the last was cut off, and the next would be appended to it

    def of(self, job: dict) -> list[dict]:
        return [row for row in self.rows if all(row.get(key) == job.get(key) for key in KEYS)]

    def add(self, job: dict, row: dict) -> None:
        row = {key: job[key] for key in KEYS if key in job} | row
        with self.lock, self.path.open("a") as file:
            self.rows.append(row)
            file.write(json.dumps(row) + "\n")

    def forget_failures(self) -> None:
        """Drop rows with errors, and the ends of their jobs, so that these run again."""
        failed = [row for row in self.rows if "error" in row]
        ended = [row for row in self.rows if "seconds" in row and any(x in failed for x in self.of(row))]
        self.rows = [row for row in self.rows if row not in failed and row not in ended]
        self.write()

    def write(self) -> None:
        self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))


def run_job(job: dict, results: Results, limit: float) -> None:
    """Run it, add its rows as they come, and a last row with what it took and how it ended, if badly."""
    done = [row["case"] for row in results.of(job) if "case" in row]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as messages:
        command = [sys.executable, str(JOB), json.dumps(job | {"skip": done})]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, text=True)
        killer = threading.Timer(limit, process.kill)
        killer.start()
        for line in process.stdout:  # rows are kept as they come: this program may be stopped at any time
            if line.startswith("{") and line.endswith("}\n"):
                results.add(job, json.loads(line))
        process.wait()
        killer.cancel()
        messages.seek(0)
        last = [line for line in messages.read().splitlines() if line.strip()][-1:]
    error = {}
    if time.monotonic() - start >= limit:
        error = {"error": f"killed after {limit:.0f} s"}
    elif process.returncode != 0:
        error = {"error": f"exit status {process.returncode}: {' '.join(last)[:300]}"}
    results.add(job, {"seconds": round(time.monotonic() - start, 1)} | error)
    state = error.get("error", "done")
    print(f"{describe(job)} {state}", flush=True)


def describe(job: dict) -> str:
    return f"{job['kind']:8} {job['implementation']:21} {job['shape']}"


def run_all(todo: list[dict], results: Results, minutes: float, limit: float) -> list[dict]:
    """Run what has not ended yet until the time is up, warming several at a time; returns what is left."""
    end = time.monotonic() + 60 * minutes
    left_out = []

    def attempt(job: dict) -> None:
        if any("seconds" in row for row in results.of(job)):
            return
        left = end - time.monotonic()
        if left < 5:
            left_out.append(job)
        else:
            run_job(job, results, min(limit, left))

    for kind, group in groupby(todo, key=lambda job: job["kind"]):
        with ThreadPoolExecutor(WORKERS if kind == "warm" else 1) as pool:
            list(pool.map(attempt, group))
    return left_out


def table(rows: list[dict]) -> str:
    """What was found: ceilings, what ended badly, and times by shape and case, the fastest first."""
    lines = []
    for row in rows:
        if row["kind"] == "ceiling" and "matmul_tflops" in row:
            lines.append(
                f"{row['device']}, {row['versions']}: bf16 product {row['matmul_tflops']:.0f} TFLOP/s, "
                f"copy {row['copy_tb_s']:.2f} TB/s"
            )
    for row in rows:
        if row["kind"] != "time" and "error" in row:
            lines.append(f"BAD {describe(row)} {row.get('case', '')}: {row['error']}")
    timed = [row for row in rows if row["kind"] == "time" and "case" in row]
    timed.sort(key=lambda row: (row["shape"], row["case"], row.get("forward_ms", 1e9)))
    for (shape, case), group in groupby(timed, key=lambda row: (row["shape"], row["case"])):
        lines.append(f"\n{case}; heads {shape[0]}:{shape[1]}, D {shape[2]}, Dv {shape[3]}")
        for row in group:
            text = row.get("error") or "  ".join(
                f"{which} {row[f'{which}_ms']:9.3f} ms {row[f'{which}_tflops']:6.4g} TFLOP/s"
                for which in ("forward", "backward")
            )
            both = f"  both {row['both_tflops']:6.4g} TFLOP/s" if "both_tflops" in row else ""
            lines.append(f"  {row['implementation']:21} {text}{both}")
    return "\n".join([*lines, *in_turns(rows)])


def in_turns(rows: list[dict]) -> list[str]:
    """What was timed in turns: the means of the rounds, how far these lie apart, and the noise in all."""
    lines, noise = [], []
    for row in rows:
        heads = row["shape"]
        for name, times in row.get("times", {}).items():
            if name == next(iter(row["times"])):
                lines.append(
                    f"\n{row['case']}, in turns; heads {heads[0]}:{heads[1]}, D {heads[2]}, Dv {heads[3]}"
                )
            errors = [x for x in times if isinstance(x, str)]
            if errors:
                lines.append(f"  {name:28} {errors[0]}")
                continue
            text = ""
            for which, rounds in zip(("forward", "backward"), zip(*times, strict=True), strict=True):
                mean = sum(rounds) / len(rounds)
                noise.append((max(rounds) - min(rounds)) / mean)
                text += f"  {which} {mean:9.3f} ms, {noise[-1]:5.1%} apart"
            lines.append(f"  {name:28}{text}")
    if noise:
        noise.sort()
        lines.append(
            f"\nNoise: equal work timed twice lies {noise[len(noise) // 2]:.1%} apart in the median, "
            f"{noise[-1]:.1%} at most. A smaller difference says nothing."
        )
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9, help="start no new job after this long")
    parser.add_argument("--limit", type=float, default=90, help="seconds after which a job is killed")
    parser.add_argument("--stages", nargs="+", default=["warm", "turns", "time", "grid"])
    parser.add_argument("--output", type=Path, default=Path("outputs/attention"))
    parser.add_argument("--retry", action="store_true", help="run again what ended badly")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    results = Results(options.output / "attention.jsonl")
    if options.retry:
        results.forget_failures()
    if not options.table:
        todo = list(jobs(options.stages, options.device))
        left_out = run_all(todo, results, options.minutes, options.limit)
        if left_out:
            print(f"{len(left_out)} jobs left out, for want of time: call again to go on")
    print(table(results.rows))


if __name__ == "__main__":
    main()
