"""The process of one rank, and how `dryrun`, `rehearse` and traces of layers start one for each rank:

    python -m wlb_titan.runtime.one_rank.process '{"run": "dryrun", "rank": 3, "world_size": 64, ...}'

Its argument is JSON: "run" is "dryrun", "rehearse" or "layers", "file" and "overrides" name the job, and
"result" the file to write. The rest are the trainer's own keywords.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from wlb_titan.errors import UserError
from wlb_titan.files import load, save
from wlb_titan.progress import Report, counted, silent

PROCESS = "wlb_titan.runtime.one_rank.process"
CGROUP = Path("/sys/fs/cgroup")


def results(
    asked: Sequence[Mapping[str, Any]], at_once: int, *, on_cpu: bool, report: Report = silent, what: str = ""
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


def main() -> None:
    """Exits with 1 after an error, which is written in place of a result."""
    asked = json.loads(sys.argv[1])
    path = Path(asked.pop("result"))
    try:
        found = result(**asked)
    except UserError as error:
        found = {"rank": asked["rank"], "error": str(error)}
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        found = {"rank": asked["rank"], "error": said, "traceback": traceback.format_exc()}
    save(path, found)
    sys.exit("error" in found)


def result(
    run: str, *, file: str, overrides: list[str], rank: int, world_size: int, **keywords: Any
) -> dict[str, Any]:
    from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator
    from wlb_titan.runtime.train import set_allocator

    # What a launcher would tell torch and torchtitan, before torchtitan is imported.
    set_allocator()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    use_cpu_without_accelerator()
    import torch

    from wlb_titan.runtime.models.load import load_config
    from wlb_titan.runtime.one_rank.dry_run import DryTrainer
    from wlb_titan.runtime.one_rank.layer_trace import LayerTracer
    from wlb_titan.runtime.one_rank.rehearsal import RehearsalTrainer

    if not torch.accelerator.is_available():
        torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.ERROR)
    config = load_config(file, overrides, world_size=world_size).config
    trainers = {"dryrun": DryTrainer, "rehearse": RehearsalTrainer, "layers": LayerTracer}
    trainer = trainers[run](config, rank=rank, world_size=world_size, **keywords)
    try:
        return trainer.run()
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
