"""What the multi-process tests share: a small corpus, one seed checkpoint, and a way to run experiments."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parent
CONFIG = TESTS / "experiment.toml"
TIMEOUT = 240  # seconds for one experiment


@dataclass
class Experiment:
    """One training run of `experiment.toml` with overrides."""

    folder: Path
    overrides: Sequence[str]

    def words(self) -> list[str]:
        return ["--dump_folder", str(self.folder), *self.overrides]

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def losses(self) -> list[float]:
        return [record["loss"] for record in self.metrics()]


class Lab:
    """Runs experiments on one corpus, from one seed checkpoint, in processes forked from `worker.py`."""

    def __init__(self, folder: Path, base: str = "bases:llama"):
        self.folder = folder
        self.base = base
        self.corpus = folder / "corpus"
        self._worker: subprocess.Popen | None = None
        make_corpus(folder / "documents.jsonl", self.corpus)
        seed = self.experiment("seed", "--checkpoint.create_seed_checkpoint", "true")
        self.run(1, [seed])
        self.seed_checkpoint = seed.folder / "checkpoint" / "step-0"

    def experiment(self, name: str, *overrides: str) -> Experiment:
        words = ["--wlb.corpus.path", str(self.corpus)]
        if "--base" not in overrides:
            words += ["--base", self.base]
        if name != "seed":
            words += ["--checkpoint.initial_load_path", str(self.seed_checkpoint)]
        return Experiment(self.folder / name, [*words, *overrides])

    def run(self, processes: int, experiments: Sequence[Experiment]) -> None:
        """Runs the experiments one after the other, each in so many processes."""
        for experiment in experiments:
            log = experiment.folder.with_suffix(".log")
            job = {
                "processes": processes,
                "port": free_port(),
                "log": str(log),
                "words": ["--config", str(CONFIG), *experiment.words()],
            }
            code = self._ask(json.dumps(job))
            assert code == "0", f"{experiment.folder.name}: exit code {code}: {first_failure(log)}"

    def close(self) -> None:
        """Ends the worker and whatever it has started."""
        if self._worker is not None:
            os.killpg(self._worker.pid, signal.SIGKILL)
            self._worker.communicate()
            self._worker = None

    def _ask(self, job: str) -> str:
        if self._worker is None:
            self._worker = subprocess.Popen(
                [sys.executable, str(TESTS / "worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env=environment(),
            )
        print(job, file=self._worker.stdin, flush=True)
        if not select.select([self._worker.stdout], [], [], TIMEOUT)[0]:
            self.close()
            return f"none within {TIMEOUT} seconds"
        return self._worker.stdout.readline().strip()


def first_failure(log: Path) -> str:
    """What a log says from the first traceback on, or else its end."""
    text = log.read_text() if log.exists() else ""
    found = re.search("terminate called|Fatal Python error|Traceback", text)
    return text[found.start() :][:12000] if found else text[-12000:]


def layout(pp: int = 1, cp: int = 1, tp: int = 1, dp: int = 1) -> list[str]:
    """Overrides for these degrees; the step of the whole job stays 4 micro-batches."""
    return [
        *("--parallelism.pipeline_parallel_degree", str(pp)),
        *("--parallelism.context_parallel_degree", str(cp)),
        *("--parallelism.tensor_parallel_degree", str(tp)),
        *("--parallelism.data_parallel_shard_degree", str(dp)),
        *("--training.local_batch_size", str(4 // dp)),
    ]


def torchrun(processes: int, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        *arguments,
    ]


def environment() -> dict[str, str]:
    """The environment of a job: with it the tests' bases and plug-ins can be imported."""
    own = (TESTS, TESTS.parent / "unit", TESTS.parents[1] / "examples" / "own_policies")
    folders = [*map(str, own), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def make_corpus(texts: Path, output: Path, lengths=None) -> None:
    """Documents of so many words out of 200, so that something can be learned; if not given, 400 documents of
    4 to 1,500 words, most of them short."""
    from wlb_titan.corpus.prepare import prepare_corpus
    from wlb_titan.corpus.settings import PrepareSettings

    random = np.random.default_rng(0)
    words = [f"w{i:03d}" for i in range(200)]
    if lengths is None:
        lengths = np.clip(random.lognormal(4.0, 1.2, size=400), 4, 1500).astype(int)
    with open(texts, "w") as file:
        for length in lengths:
            text = " ".join(words[i] for i in np.minimum(random.geometric(0.05, size=length), 200) - 1)
            file.write(json.dumps({"text": text}) + "\n")
    prepare_corpus(PrepareSettings(source=f"jsonl:{texts}#text", vocab_size=500), output)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()
