"""Where drills are run: a small corpus, and ranks that can be killed, stopped and starved."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from forking import ForkServer, Job, Rank, await_
from lab import Run, make_corpus

PATIENCE = 120  # seconds for a whole drill on a busy machine

CONFIG = """
base = "llama3_debug"
training.seq_len = 128
training.local_batch_size = 2
training.steps = 8
checkpoint.enable = true
checkpoint.interval = 2
checkpoint.keep_latest_k = 0
checkpoint.last_save_model_only = false
wlb.corpus.path = "{corpus}"
comm.init_timeout_seconds = 600
comm.train_timeout_seconds = 600
debug.seed = 1
debug.enable_structured_logging = false
"""


class Ground:
    """Runs jobs of two ranks, of which nothing ends one but itself, or who drills it."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.folder = folder
        self.corpus = folder / "corpus"
        make_corpus(folder / "documents.jsonl", self.corpus)
        self.config = folder / "drill.toml"
        self.config.write_text(CONFIG.format(corpus=self.corpus))
        self._server = server

    def start(self, name: str, *words: str, rank1: tuple[str, ...] = (), largest_file: int = 0) -> Drill:
        """Starts a job in the dump folder `name`, where another may have left things. `words` are overrides
        for all ranks and `rank1` for one of them; no file may have more than `largest_file` bytes."""
        attempt = len(list(self.folder.glob(f"{name}.*.rank0.log")))
        common = ("--config", str(self.config), "--dump_folder", str(self.folder / name), *words)
        ranks = [
            Rank((*common, *own), self.folder / f"{name}.{attempt}.rank{number}.log", largest_file)
            for number, own in enumerate(((), rank1))
        ]
        logs = [rank.log for rank in ranks]
        return Drill(self.folder / name, self._server.start(ranks, together=False), logs)

    def run(self, name: str, *words: str, **how) -> Drill:
        """Starts a job and waits for its end."""
        drill = self.start(name, *words, **how)
        drill.wait()
        return drill

    @cached_property
    def undisturbed(self) -> Drill:
        """A run that nothing happens to."""
        return self.run("undisturbed")

    def ends_undisturbed(self, name: str, *words: str) -> Drill:
        """Starts a job, perhaps again: it ends with the losses of an undisturbed one."""
        drill = self.run(name, *words)
        assert drill.codes == self.undisturbed.codes == [0, 0], drill.log()
        assert drill.losses() == self.undisturbed.losses()
        return drill

    def cut_off(self, name: str, keep: int) -> Path:
        """A dump folder as if the undisturbed job had been cut off after the checkpoint of step `keep`."""
        shutil.copytree(self.undisturbed.folder, self.folder / name)
        for step in range(keep + 2, 10, 2):
            shutil.rmtree(self.folder / name / "checkpoint" / f"step-{step}")
        return self.folder / name


class Drill(Run):
    """A job that runs or has run: its ranks' process numbers and, after `wait`, their exit codes."""

    def __init__(self, folder: Path, job: Job, logs: list[Path]) -> None:
        super().__init__(folder)
        self.processes = job.processes
        self.codes: list[int] = []
        self._job, self._logs = job, logs

    def wait(self) -> list[int]:
        self.codes = self._job.wait(PATIENCE)
        return self.codes

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.processes[rank], number)

    def kill(self) -> None:
        """SIGKILL to all ranks."""
        self._job.kill()
        self.wait()

    def log(self, *ranks: int) -> str:
        """Of these ranks, or of both."""
        return "\n".join(self._logs[rank].read_text() for rank in ranks or (0, 1))

    def ends_in_error(self, *told: str) -> None:
        """Waits until all ranks have ended, of which one has refused and said why."""
        codes = self.wait()
        assert 2 in codes and 0 not in codes, self.log()
        assert "Traceback" not in self.log() and all(words in self.log() for words in told), self.log()

    def await_(self, happened: Callable[[], object]) -> None:
        await_(happened, self.log, PATIENCE)

    def await_step(self, step: int) -> None:
        self.await_(lambda: len(self.metrics()) >= step)

    def snapshot(self) -> dict[Path, tuple[int, int]]:
        """Every file of the dump folder but the lock: size and time of the last change."""
        files = [file for file in self.folder.rglob("*") if file.is_file() and file.name != ".lock"]
        return {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}
