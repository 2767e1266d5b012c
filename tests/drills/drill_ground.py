"""Where drills are run: a small corpus, and ranks that can be killed, stopped and starved."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from forking import ForkServer, Job, Rank

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
    """Runs jobs of a few ranks, of which nothing ends one but itself, or who drills it."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.folder = folder
        self.corpus = folder / "corpus"
        make_corpus(folder / "texts", self.corpus)
        self.config = folder / "drill.toml"
        self.config.write_text(CONFIG.format(corpus=self.corpus))
        self._server = server

    def start(self, name: str, *words: str, ranks: int = 2, **of_rank: dict) -> Drill:
        """Starts a job in the dump folder `name`, where another may have left things. `words` are overrides
        for all ranks, and `rank1={"words": [...], "largest_file": bytes}` is for one of them."""
        dump = self.folder / name
        attempt = len(list(self.folder.glob(f"{name}.*.rank0.log")))
        common = ("--config", str(self.config), "--dump_folder", str(dump), *words)
        specs = []
        for number in range(ranks):
            own = of_rank.get(f"rank{number}", {})
            log = self.folder / f"{name}.{attempt}.rank{number}.log"
            specs.append(Rank((*common, *own.get("words", ())), log, own.get("largest_file", 0)))
        return Drill(dump, self._server.start(specs, together=False), [spec.log for spec in specs])

    def run(self, name: str, *words: str, **how) -> Drill:
        """Starts a job and waits for its end."""
        drill = self.start(name, *words, **how)
        drill.wait()
        return drill

    def ends_like(self, undisturbed: Run, name: str, *words: str) -> Drill:
        """Starts a job, perhaps again: it ends with the losses of an undisturbed one."""
        drill = self.run(name, *words)
        assert drill.codes == [0, 0], drill.log()
        assert drill.losses() == undisturbed.losses()
        return drill


class Run:
    """What a run leaves in its dump folder, `dump`."""

    def __init__(self, dump: Path) -> None:
        self.dump = dump

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


class Drill(Run):
    """A job that runs or has run: its ranks' process numbers and, after `wait`, their exit codes."""

    def __init__(self, dump: Path, job: Job, logs: list[Path]) -> None:
        super().__init__(dump)
        self.processes = job.processes
        self.codes: list[int] = []
        self._job = job
        self._logs = logs

    def wait(self) -> list[int]:
        self.codes = self._job.wait(PATIENCE)
        return self.codes

    def signal(self, number: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            os.kill(self.processes[rank], number)

    def kill(self) -> None:
        """SIGKILL to all ranks."""
        self._job.kill()
        self.wait()

    def log(self, rank: int | None = None) -> str:
        logs = self._logs if rank is None else [self._logs[rank]]
        return "\n".join(log.read_text() for log in logs if log.exists())

    def await_(self, happened: Callable[[], bool]) -> None:
        await_(happened, self.log)

    def await_step(self, step: int) -> None:
        self.await_(lambda: max(self.losses(), default=0) >= step)


def await_(happened: Callable[[], bool], log: Callable[[], str], patience: float = PATIENCE) -> None:
    """Waits until something has happened; fails with a log if it does not within so many seconds."""
    deadline = time.monotonic() + patience
    while not happened():
        assert time.monotonic() < deadline, log()
        time.sleep(0.02)


def copy_of(job: Run, ground: Ground, name: str, keep: int) -> Path:
    """A dump folder as if the job had been cut off after the checkpoint of step `keep`."""
    shutil.copytree(job.dump, ground.folder / name)
    for step in (2, 4, 6, 8):
        if step > keep:
            shutil.rmtree(ground.folder / name / "checkpoint" / f"step-{step}")
    return ground.folder / name


def make_corpus(texts: Path, output: Path) -> None:
    from wlb_titan.corpus.prepare import PrepareSettings, prepare_corpus

    texts.mkdir()
    for number in range(60):
        (texts / f"{number:02}.txt").write_text(
            f"Text {number} says " + f"w{number % 7} " * (number * 13 % 190)
        )
    prepare_corpus(PrepareSettings(source=f"text:{texts}", vocab_size=300), output)
