"""Jobs whose ranks are processes that `fork_server.py` forks: how tests start them and see them end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).parent
TRAIN = "wlb_titan.runtime.train"
VISIBLE_GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")
"""As it was before tests/conftest.py hid the GPUs."""


@dataclass(frozen=True)
class Rank:
    """One process of a job: a program's arguments, and the file to which all that it prints is appended."""

    words: Sequence[str]
    log: Path
    largest_file: int = 0  # bytes; a larger file cannot be written, as on a full disk; 0: no limit


@dataclass
class Job:
    """A job that runs or has run: its ranks' process numbers, and the exit codes of those that have ended."""

    server: ForkServer
    processes: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)

    def wait(self, timeout: float, ranks: Sequence[int] | None = None) -> list[int]:
        """The exit codes of these ranks, or of all, when they have ended. If they do not within `timeout`
        seconds, the server ends, and with it every job."""
        ranks = range(len(self.processes)) if ranks is None else ranks
        self.server.wait_until(lambda: self.codes.keys() >= set(ranks), timeout)
        return [self.codes[rank] for rank in ranks]

    def kill(self) -> None:
        """SIGKILL to all ranks that have not ended."""
        for rank, process in enumerate(self.processes):
            if rank not in self.codes:
                with contextlib.suppress(ProcessLookupError):  # it ends just now
                    os.kill(process, signal.SIGKILL)


class ForkServer:
    """Starts jobs in processes forked from one that has everything imported, and follows their news.

    It takes its time to start, so it does so with the first job; after an end, with the next job anew.
    Threads may share it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._jobs: list[Job] = []
        self._starting = threading.Lock()
        self._news = threading.Condition()

    def start(
        self,
        ranks: Sequence[Rank],
        program: str = TRAIN,
        together: bool = True,
        environment: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> Job:
        """Starts a program, a module whose `main()` reads sys.argv and the environment as under torchrun.

        Args:
            together: a rank that fails takes the others down, as under torchrun; or else nothing ends a rank
                but itself, or who drills it.
            environment: of the ranks, over what torchrun would give them.
            fresh: ranks import everything themselves, as those of a real job do.
        """
        job = Job(self)
        with self._starting:
            if self._process is None:
                self._process = self._begin()
            self._jobs.append(job)
            description = {
                "number": len(self._jobs) - 1,
                "program": program,
                "together": together,
                "port": free_port(),
                "environment": dict(environment or {}),
                "fresh": fresh,
                "ranks": [dataclasses.asdict(rank) | {"log": str(rank.log)} for rank in ranks],
            }
            print(json.dumps(description), file=self._process.stdin, flush=True)
        self.wait_until(lambda: bool(job.processes), timeout=300)
        return job

    def wait_until(self, happened: Callable[[], bool], timeout: float) -> None:
        """Waits for news with which something has happened; see `Job.wait`."""
        with self._news:
            if self._news.wait_for(happened, timeout):
                return
        self.close()
        raise AssertionError(f"no answer within {timeout} seconds: something hangs")

    def close(self) -> None:
        """Ends the server and whatever it has started."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _begin(self) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, str(TESTS / "fork_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=TESTS.parent,
            start_new_session=True,
            env=environment(),
        )
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            news = json.loads(line)
            job = self._jobs[news["job"]]
            with self._news:
                if "processes" in news:
                    job.processes = news["processes"]
                else:
                    job.codes[news["rank"]] = news["code"]
                self._news.notify_all()


def environment() -> dict[str, str]:
    """The environment of a job: with it the tests' bases and plug-ins can be imported."""
    own = [TESTS / name for name in ("distributed", "kernels", "unit", "gpu")]
    own.append(TESTS.parent / "examples" / "own_policies")
    path = filter(None, [*map(str, own), os.environ.get("PYTHONPATH", "")])
    return {
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to ask for GPUs without CUDA, which would not survive a fork
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
    }


def command(*words: object, log: int | IO[str] = subprocess.PIPE, **how: Any) -> subprocess.Popen[str]:
    """A Python module with its arguments, as a user starts it. It hears Ctrl-C, also where the tests run
    behind a shell's `&`, which has SIGINT ignored."""
    how |= {"stdout": log, "stderr": subprocess.STDOUT, "text": True}
    how["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([sys.executable, "-m", *map(str, words)], **how)


def await_(happened: Callable[[], object], log: Callable[[], str], patience: float = 120) -> None:
    """Waits until something has happened; fails with a log if it does not within so many seconds."""
    deadline = time.monotonic() + patience
    while not happened():
        assert time.monotonic() < deadline, log()
        time.sleep(0.02)


def free_port() -> int:
    """A port that nobody has, below those that systems give to connections, which could be gone at once."""
    while True:
        port = random.randrange(10000, 32768)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("localhost", port))
            return port
