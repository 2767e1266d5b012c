"""Where drills are run: a small corpus, and ranks that can be killed, stopped and starved."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
PATIENCE = 120  # seconds for a whole drill on a busy machine

CONFIG = """
base = "llama3_debug"
[training]
seq_len = 128
local_batch_size = 2
steps = 8
[checkpoint]
enable = true
interval = 2
keep_latest_k = 0
last_save_model_only = false
[wlb.corpus]
path = "{corpus}"
[comm]
init_timeout_seconds = 600
train_timeout_seconds = 600
[debug]
seed = 1
enable_structured_logging = false
"""


class Ground:
    """Runs jobs of a few ranks in processes forked from `forker.py`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.corpus = folder / "corpus"
        make_corpus(folder / "texts", self.corpus)
        self.config = folder / "drill.toml"
        self.config.write_text(CONFIG.format(corpus=self.corpus))
        self._forker = subprocess.Popen(
            [sys.executable, str(HERE / "forker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, name: str, *words: str, ranks: int = 2, **of_rank: dict) -> Job:
        """Starts a job in the dump folder `name`.

        Args:
            name: of the folder; another job may have left things there.
            words: overrides for all ranks.
            ranks: how many.
            of_rank: `rank1={"words": [...], "largest_file": bytes}` for one of them.
        """
        dump = self.folder / name
        own = [of_rank.get(f"rank{number}", {}) for number in range(ranks)]
        attempt = len(list(self.folder.glob(f"{name}.*.rank0.log")))
        specs = [
            {
                "words": [
                    *("--config", str(self.config), "--dump_folder", str(dump), *words),
                    *one.get("words", []),
                ],
                "log": str(self.folder / f"{name}.{attempt}.rank{number}.log"),
                "largest_file": one.get("largest_file", 0),
            }
            for number, one in enumerate(own)
        ]
        print(json.dumps({"port": free_port(), "ranks": specs}), file=self._forker.stdin, flush=True)
        return Job(dump, json.loads(self.answer()), [Path(spec["log"]) for spec in specs], self)

    def run(self, name: str, *words: str, **how) -> Job:
        """Starts a job and waits for its end."""
        job = self.start(name, *words, **how)
        job.wait()
        return job

    def answer(self) -> str:
        assert self._forker.stdout is not None
        if not select.select([self._forker.stdout], [], [], PATIENCE)[0]:
            self.close()
            raise AssertionError(f"no answer within {PATIENCE} seconds: something hangs")
        return self._forker.stdout.readline()

    def close(self) -> None:
        if self._forker.poll() is None:
            os.killpg(self._forker.pid, signal.SIGKILL)
        self._forker.communicate()


class Job:
    """A job that runs or has run.

    Attributes:
        dump: its dump folder.
        processes: number of each rank's process.
        codes: exit codes, after `wait`.
        seconds: how long each rank ran, after `wait`.
    """

    def __init__(self, dump: Path, processes: list[int], logs: list[Path], ground: Ground) -> None:
        self.dump = dump
        self.processes = processes
        self.codes: list[int] = []
        self.seconds: list[float] = []
        self._logs = logs
        self._ground = ground

    def wait(self) -> list[int]:
        if not self.codes:
            ends = json.loads(self._ground.answer())
            self.codes, self.seconds = [code for code, _ in ends], [seconds for _, seconds in ends]
        return self.codes

    def signal(self, number: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            os.kill(self.processes[rank], number)

    def kill(self) -> None:
        """SIGKILL to all ranks."""
        self.signal(signal.SIGKILL, range(len(self.processes)))
        self.wait()

    def await_(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def log(self, rank: int | None = None) -> str:
        logs = self._logs if rank is None else [self._logs[rank]]
        return "\n".join(log.read_text() for log in logs if log.exists())

    def steps(self) -> list[dict]:
        file = self.dump / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def losses(self) -> dict[int, float]:
        return {step["step"]: step["loss"] for step in self.steps()}

    def snapshot(self) -> dict[str, tuple[int, int]]:
        """Every file of the dump folder but the lock: size and time of the last change."""
        files = [file for file in self.dump.rglob("*") if file.is_file() and file.name != ".lock"]
        return {
            str(file.relative_to(self.dump)): (file.stat().st_size, file.stat().st_mtime_ns) for file in files
        }


def copy_of(job: Job, ground: Ground, name: str, keep: int) -> Path:
    """A dump folder as if the job had been cut off after the checkpoint of step `keep`."""
    shutil.copytree(job.dump, ground.folder / name)
    for step in (2, 4, 6, 8):
        if step > keep:
            shutil.rmtree(ground.folder / name / "checkpoint" / f"step-{step}")
    return ground.folder / name


def make_corpus(texts: Path, output: Path) -> None:
    from wlb_titan.corpus.prepare import prepare_corpus
    from wlb_titan.corpus.settings import PrepareSettings

    texts.mkdir()
    for number in range(60):
        (texts / f"{number:02}.txt").write_text(
            f"Text {number} says " + f"w{number % 7} " * (number * 13 % 190)
        )
    prepare_corpus(PrepareSettings(source=f"text:{texts}", vocab_size=300), output)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]
