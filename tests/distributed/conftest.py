"""What the multi-process tests share: a small corpus, one seed checkpoint, and a way to run experiments."""

from __future__ import annotations

import json
import os
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
TIMEOUT = 580  # seconds for one launch


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
    """Runs experiments on one corpus, from one seed checkpoint."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.corpus = folder / "corpus"
        make_corpus(folder / "documents.jsonl", self.corpus)
        seed = self.experiment("seed", "--checkpoint.create_seed_checkpoint", "true")
        self.run(1, [seed])
        self.seed_checkpoint = seed.folder / "checkpoint" / "step-0"

    def experiment(self, name: str, *overrides: str) -> Experiment:
        words = ["--wlb.corpus.path", str(self.corpus)]
        if name != "seed":
            words += ["--checkpoint.initial_load_path", str(self.seed_checkpoint)]
        return Experiment(self.folder / name, [*words, *overrides])

    def run(self, processes: int, experiments: Sequence[Experiment]) -> None:
        """Runs the experiments one after the other, in the same `processes` processes."""
        jobs = self.folder / "jobs.json"
        jobs.write_text(json.dumps([[str(CONFIG), e.words(), free_port()] for e in experiments]))
        log = self.folder / "log.txt"
        with open(log, "w") as output:
            launcher = subprocess.Popen(
                torchrun(processes, str(TESTS / "worker.py"), str(jobs)),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(TESTS)},  # for the bases of the tests
            )
            try:
                code = launcher.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                code = f"none within {TIMEOUT} seconds"
                os.killpg(launcher.pid, signal.SIGKILL)
        assert code == 0, f"exit code {code}: {log.read_text()[-12000:]}"


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


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def make_corpus(texts: Path, output: Path) -> None:
    """400 documents of 4 to 1,500 words out of 200, so that something can be learned; most are short."""
    from wlb_titan.corpus.prepare import prepare_corpus
    from wlb_titan.corpus.settings import PrepareSettings

    random = np.random.default_rng(0)
    words = [f"w{i:03d}" for i in range(200)]
    lengths = np.clip(random.lognormal(4.0, 1.2, size=400), 4, 1500).astype(int)
    with open(texts, "w") as file:
        for length in lengths:
            text = " ".join(words[i] for i in np.minimum(random.geometric(0.05, size=length), 200) - 1)
            file.write(json.dumps({"text": text}) + "\n")
    prepare_corpus(PrepareSettings(source=f"jsonl:{texts}#text", vocab_size=500), output)


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Lab:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return Lab(tmp_path_factory.mktemp("lab"))
