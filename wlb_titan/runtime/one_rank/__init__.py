"""One rank of a big job, alone in a process: dry runs (without memory) and rehearsals (measured).

`results` starts processes, which run `process.py`. Read that first, then `lone.py`, then `dry_run.py` with
`dry_trace.py`, or `rehearsal.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from wlb_titan.files import load
from wlb_titan.progress import Progress, counted, silent

PROCESS = "wlb_titan.runtime.one_rank.process"
CGROUP = Path("/sys/fs/cgroup")


def results(
    asked: Sequence[Mapping[str, Any]],
    at_once: int,
    *,
    on_cpu: bool,
    report: Progress = silent,
    what: str = "",
) -> list[dict[str, Any]]:
    """What processes with these arguments, without "result", write; with `error` where one failed. No process
    outlives this call."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    running: list[subprocess.Popen[str]] = []

    def one(number: int) -> dict[str, Any]:
        path = Path(folder) / f"{number}.json"
        process = subprocess.Popen(
            [sys.executable, "-m", PROCESS, json.dumps({**asked[number], "result": str(path)})],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            running.append(process)
            tail = process.communicate()[1].strip()[-2000:]
        if path.exists():
            found: dict[str, Any] = load(dict[str, Any], path)
            return found
        error = f"the process ended with exit code {process.returncode}: {tail}"
        return {"rank": asked[number]["rank"], "error": error}

    with tempfile.TemporaryDirectory(prefix="wlb-ranks-") as folder, ThreadPoolExecutor(at_once) as pool:
        try:
            found = pool.map(one, range(len(asked)))
            return [next(found) for _ in counted(asked, report, what)]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.kill()
            raise


def at_once() -> int:
    """How many ranks run side by side on CPUs: as many as this machine and this container have cores and free
    GiB."""
    cores: float = len(os.sched_getaffinity(0))
    free = int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) << 10
    with suppress(OSError, ValueError):  # there is no container, or no bound ("max")
        quota, period = (CGROUP / "cpu.max").read_text().split()
        cores = min(cores, int(quota) / int(period))
    with suppress(OSError, ValueError):
        free = min(free, int((CGROUP / "memory.max").read_text()))
    return max(int(min(cores, free / 2**30)), 1)
