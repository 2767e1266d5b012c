"""A GPU's first ten minutes: what is worth most comes first, and nothing that was found is lost.

    make test-gpu                       # on a GPU; again to go on where it was cut
    make test-gpu PARTS="trial times"   # these, all of them again
    make test-gpu BARE=1                # by the python3 at hand: torch 2.11, Triton 3.6 and numpy
    make test-gpu-small                 # every part in small, on the CPU

Each part is a process that is killed after its limit of seconds. Its rows are appended to OUT/by_value.jsonl
as they come, and a second call does what is missing or failed. OUT is benchmarks/results/DEVICE, or as given.
What parts print is appended to outputs/by_value.log. by_value_parts.py has those that are no tests.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
LOG = ROOT / "outputs" / "by_value.log"
CPU_SECONDS = 3600  # of a part in small, on a machine however busy
ASK = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


class Part(NamedTuple):
    name: str
    seconds: float  # its limit on a GPU
    words: tuple[str, ...] = ()  # for pytest, where it is of the project's tests


TRIAL, TESTS = "tests/gpu/test_trial.py", ("-n", "2", "--dist", "loadfile", "tests/gpu")
PARTS = (
    Part("trial", 240),
    Part("times", 120),
    Part("experts", 240, ("tests/gpu/test_steps.py", "-k", "experts")),
    Part("float8", 60),
    Part("groups", 60),
    Part("overlap", 90),
    Part("test_trial", 1200, ("-x", "--timeout", "1200", TRIAL)),
    Part("tests", 1800, (*TESTS, "--ignore", TRIAL, "-k", "not experts")),
)
NAMES = [part.name for part in PARTS]


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def tell(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as results:
        results.write(json.dumps(row) + "\n")
    print(*(f"{key}={x:.4g}" if isinstance(x, float) else f"{key}={x}" for key, x in row.items()), flush=True)


def run(parts: Sequence[Part], file: Path, device: str, again: bool = False) -> bool:
    """Runs what is not done, or all; whether all has ended well."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():  # a last row that was cut off is gone
        file.write_text("".join(x for x in file.read_text().splitlines(keepends=True) if x.endswith("\n")))
    done = {row["part"] for row in rows_of(file) if row.get("ended") == 0 and not again}
    well = True
    for name, seconds, words in parts:
        if name in done:
            print(f"{name} is done")
        elif words and (lacking := [x for x in ("torchtitan", "pytest") if not importlib.util.find_spec(x)]):
            tell(
                file, {"part": name, "skipped": f"needs {' and '.join(lacking)}: `make setup`, without BARE"}
            )
        else:
            begin = time.monotonic()
            command = [str(Path(__file__).with_name("by_value_parts.py")), name, str(file), device]
            if words:
                command = ["-m", "pytest", "--device", device, "--results", str(file), *words]
            command += ["again"] * (again and not words)
            code, last = call(command, CPU_SECONDS if device == "cpu" else seconds)
            well &= code == 0
            took = round(time.monotonic() - begin)
            tell(file, {"part": name, "ended": code, "seconds": took, "last": last})
    return well


def call(command: Sequence[str], seconds: float) -> tuple[int | str, str]:
    """The exit status of a Python process, or "killed", and the last line that it has printed."""
    LOG.parent.mkdir(exist_ok=True)
    with LOG.open("a+") as log:
        begin = log.seek(0, os.SEEK_END)
        how = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": ROOT, "start_new_session": True}
        process = subprocess.Popen([sys.executable, *command], **how)
        try:
            code = process.wait(seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(process.pid, signal.SIGKILL)
            code = "killed"
        log.seek(begin)
        return code, (log.read().strip().splitlines() or [""])[-1][-300:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(NAMES)}; again, if done")
    parser.add_argument("--out", type=Path, help="folder of by_value.jsonl")
    parser.add_argument("--small", action="store_true", help="on the CPU")
    args = parser.parse_args()
    if unknown := sorted(set(args.parts) - set(NAMES)):
        parser.error(f"{', '.join(unknown)}: the parts are {', '.join(NAMES)}")
    if lacking := [name for name in ("torch", "triton", "numpy") if not importlib.util.find_spec(name)]:
        parser.error(
            f"{sys.executable} lacks {' and '.join(lacking)}; give another with PYTHON=..., or install "
            "torch 2.11 and Triton 3.6, or later ones, and numpy"
        )
    device = "" if args.small else subprocess.check_output([sys.executable, "-c", ASK], text=True).strip()
    if not args.small and not device:
        parser.error("torch finds no GPU here; `make test-gpu-small` runs all parts in small on the CPU")
    folder = args.out or ROOT / "benchmarks" / "results" / "_".join(device.lower().split()[:2])
    parts = [part for part in PARTS if not args.parts or part.name in args.parts]
    well = run(parts, folder / "by_value.jsonl", "cpu" if args.small else "cuda", bool(args.parts))
    sys.exit(not well)


if __name__ == "__main__":
    main()
