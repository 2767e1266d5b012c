"""What the multi-process tests share: a small corpus, one seed checkpoint, and a way to run experiments."""

from __future__ import annotations

import json
import math
import re
from collections import UserDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from forking import ForkServer, Job, Rank, await_

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

from wlb_titan.pipeline.schedule import SCHEDULES  # noqa: E402

TESTS = Path(__file__).parent
CONFIG = TESTS / "experiment.toml"
TIMEOUT = 240  # seconds for one experiment
AT_ONCE = 3  # experiments: a rank often waits for others, and rank 0 for two seconds at its end


@dataclass
class Run:
    """What a training run leaves in its dump folder."""

    folder: Path

    def metrics(self) -> list[dict]:
        return lines_of(self.folder / "metrics.jsonl")

    def validation(self) -> list[dict]:
        return lines_of(self.folder / "validation.jsonl")

    def losses(self) -> list[float]:
        return [record["loss"] for record in self.metrics()]


def rows(table, long: Collection[str]) -> list:
    """Names as a test's parameters, of which those in `long` run in `make test-long` alone."""
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in table]


def lines_of(file: Path) -> list:
    """The records of a file of JSON lines, which may not be there yet."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def going_on(run: Run, step: int) -> list[str]:
    """Overrides of a run that goes on from the checkpoint of another one's step."""
    path = run.folder / "checkpoint" / f"step-{step}"
    words = ["--checkpoint.initial_load_path", str(path)]
    return [*words, "--checkpoint.initial_load_model_only", "false"]


@dataclass
class Experiment(Run):
    """A training run of `experiment.toml` with overrides."""

    overrides: Sequence[str]

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def words(self) -> list[str]:
        return ["--dump_folder", str(self.folder), *self.overrides]


class Lab:
    """Runs experiments on one corpus, from one seed checkpoint, in forked processes."""

    def __init__(
        self,
        folder: Path,
        server: ForkServer,
        base: str = "bases:llama",
        common: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        lengths: Sequence[int] | None = None,
    ):
        """Makes a corpus, of documents as of `make_corpus`, and a seed checkpoint; `base` is of experiments
        that name none, and `common` are overrides of all, before their own."""
        self.folder = folder
        self.base = base
        self.common = common
        self.corpus = folder / "corpus"
        self.environment = environment or {}
        self._server = server
        make_corpus(folder / "documents.jsonl", self.corpus, lengths)
        seed = self.experiment("seed", "--checkpoint.create_seed_checkpoint", "true")
        self.run(1, [seed])
        self.seed_checkpoint = seed.folder / "checkpoint" / "step-0"

    def reading(self, corpus: Path | None) -> list[str]:
        """Overrides of an experiment on another corpus with this one's tokenizer."""
        words = ["--wlb.corpus.tokenizer", str(self.corpus / "tokenizer")]
        return words if corpus is None else [*words, "--wlb.corpus.path", str(corpus)]

    def experiment(self, name: str, *overrides: str) -> Experiment:
        words = ["--wlb.corpus.path", str(self.corpus), *self.common]
        if "--base" not in overrides:
            words += ["--base", self.base]
        if name != "seed":
            words += ["--checkpoint.initial_load_path", str(self.seed_checkpoint)]
        return Experiment(self.folder / name, [*words, *overrides])

    def start(
        self,
        processes: int,
        experiment: Experiment,
        environment: Mapping[str, str] | None = None,
        fresh: bool = False,
        of_last: Sequence[str] = (),
    ) -> Job:
        """Starts an experiment in so many processes, with overrides of the last one alone; the rest as of
        `ForkServer.start`."""
        words = ["--config", str(CONFIG), *experiment.words()]
        ranks = [Rank(words, experiment.log)] * (processes - 1)
        ranks.append(Rank([*words, *of_last], experiment.log))
        return self._server.start(ranks, environment={**self.environment, **(environment or {})}, fresh=fresh)

    def start_and_kill(self, processes: int, experiment: Experiment, step: int) -> int:
        """Starts an experiment, kills all ranks as soon as a step is reported; says how many steps were."""
        job = self.start(processes, experiment)
        log = partial(first_failure, experiment.log)
        await_(lambda: job.codes or len(experiment.metrics()) >= step, log, 180)
        assert not job.codes, log()
        job.kill()
        assert any(job.wait(60)), "the job ended before it could be killed"
        return len(experiment.metrics())

    def run(self, processes: int, experiments: Sequence[Experiment]) -> None:
        """Runs the experiments, each in so many processes; one that fails has its first traceback."""
        running: deque[tuple[Experiment, Job]] = deque()
        for experiment in experiments:
            if len(running) == AT_ONCE:
                finish(*running.popleft())
            running.append((experiment, self.start(processes, experiment)))
        while running:
            finish(*running.popleft())


class Cases(UserDict):
    """What cases have recorded that `worker.py` runs one after the other in the same processes, by name.

    A rank that dies costs its own case, and whoever asks for that fails with its message; those after it go
    on in new processes.
    """

    def __init__(self, server: ForkServer, folder: Path, corpus: Path | None = None) -> None:
        """`folder` is for what the workers read and write."""
        super().__init__()
        self._server, self._folder, self._corpus, self._died = server, folder, corpus, dict[str, str]()
        self._batches: dict[str, Callable[[], None]] = {}

    def add(
        self,
        kind: str,
        cases: Mapping[str, Mapping],
        common: Sequence[str] = (),
        long: Collection[str] = (),
        timeout=500,
    ) -> None:
        """Cases of a kind, each in as many processes as its name says as of `layout`. A case has the kind's
        arguments, and `words`: overrides beside `common` ones and those of its name.

        As soon as one is asked for, all run that are as it is in `long` or are not: none of those whose tests
        are left out.
        """
        for part in (cases.keys() - long, cases.keys() & long):
            batch = {name: case for name, case in cases.items() if name in part}
            self._batches |= dict.fromkeys(part, partial(self._run, kind, batch, common, timeout))

    def _run(self, kind: str, cases: Mapping[str, Mapping], common: Sequence[str], timeout: float) -> None:
        self._batches = {name: run for name, run in self._batches.items() if name not in cases}
        by_ranks: dict[int, dict] = defaultdict(dict)
        for name, case in cases.items():
            words = self.words(name, name, (*common, *case.get("words", ())))
            by_ranks[ranks(name)][name] = {"kind": kind, **case, "words": words}
        for processes, left in by_ranks.items():
            while left:
                job, log, results = self.start(next(iter(left)), left, processes)
                codes = job.wait(timeout)
                self.update(json.loads(results.read_text()) if results.exists() else {})
                if any(codes) or not self.keys() >= left.keys():
                    died = next((case for case in left if case not in self), [*left][-1])
                    self.pop(died, None)
                    self._died[died] = f"{died}: exit codes {codes}: {first_failure(log)}"
                left = {case: left[case] for case in left if case not in self and case not in self._died}

    def words(self, name: str, text: str, others: Sequence[str]) -> list[str]:
        """The overrides of a case with this name and layout."""
        words = ["--dump_folder", str(self._folder / name), "--checkpoint.enable", "false"]
        words += ["--wlb.corpus.path", str(self._corpus), "--metrics.log_freq", "1"]
        return [*words, *layout(text), *others]

    def start(
        self, name: str, cases: Mapping[str, dict], processes: int, together: bool = True
    ) -> tuple[Job, Path, Path]:
        """Starts a worker on cases; the job, its log, and where its results will be."""
        jobs, log, results = (self._folder / f"{name} {kind}" for kind in ("jobs", "log", "results"))
        jobs.write_text(json.dumps({"results": str(results), "cases": cases}))
        return self._server.start([Rank([str(jobs)], log)] * processes, "worker", together), log, results

    def __missing__(self, name: str) -> list:
        if name in self._batches:
            self._batches[name]()
        if name not in self.data:
            raise AssertionError(self._died[name])
        return self.data[name]


def assert_met(met: Mapping) -> None:
    """What `recording.Recorder.met` found is calls that all meet."""
    assert met["calls"] > 0
    assert met["unmet"] is None, met["unmet"]


def finish(experiment: Experiment, job: Job) -> None:
    codes = job.wait(TIMEOUT)
    assert not any(codes), f"{experiment.folder.name}: exit codes {codes}: {first_failure(experiment.log)}"


def first_failure(log: Path) -> str:
    """What a log says from the line before the first traceback on, or else its end."""
    text = log.read_text() if log.exists() else ""
    found = re.search("(.*\n)?.*(terminate called|Fatal Python error|Traceback)", text)
    return text[found.start() :][:12000] if found else text[-12000:]


DEGREES = {
    "pp": "pipeline_parallel_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "dp": "data_parallel_shard_degree",
    "replicas": "data_parallel_replicate_degree",
}
MODELS = ("lora", "float8", "float8_lora", "qwen3", "qwen3_moe", "gpt_oss", "muse_glimmer", "deepseek_v3")
SHORT = {
    "ep": "--parallelism.expert_parallel_degree {}",
    "layers": "--base bases:layers{}",
    **{model: f"--base bases:{model}" for model in MODELS},
    "slim": "--wlb.packing.micropacks {}",
    "wlb": "--wlb.packing.thresholds [300,450]",
    "fixed_greedy": "--wlb.packing.global_batches 2",
    # A gap that it reaches at once: it would find something else whenever the clock stopped it.
    "fixed_solver": "--wlb.packing.gap 0.2",
    "reversed": "--wlb.packing.every 2",
    "merged": "--wlb.packing.dp_merge true",
    "sharers": "--wlb.packing.sharers {}",
    "asymmetric": "--wlb.packing.asymmetric true",
    "milp": "--wlb.packing.solver milp --wlb.packing.time_limit 0.5",
    "groups": "--wlb.context.groups {}",
    "stored": "--activation_checkpoint none",
    "full": "--activation_checkpoint.class FullAC",
    "selective": "--activation_checkpoint.class SelectiveDocumentAC",
    "keys": "--activation_checkpoint.class KeysAC",
    "mixed": "--activation_checkpoint.class AsNeededAC",  # with `tight`
    "always": "--parallelism.fsdp_reshard_after_forward always",
    "slack": "--wlb.packing.slack 1",
    "whole_states": "--parallelism.enable_sequence_parallel false",
    "compiled": "--compile.enable true --compile.backend aot_eager",
    "draw": "--debug.seed {}",
    "bfloat16": "--training.mixed_precision_param bfloat16",
    **{name: f"--parallelism.pipeline_parallel_schedule {name}" for name in SCHEDULES},
}
OWN = {
    "reversed": "own_policies.packing:Reversed",
    "contiguous": "own_policies.sharding:Contiguous",
    "gather": "own_policies.ulysses_gather:UlyssesGather",
}
POLICIES = (
    ("plain", "dealt", "wlb_lazy", "slim", "wlb", "fixed_greedy", "fixed_solver", "reversed", "auto"),
    ("per_sequence", "per_document", "adaptive", "hybrid", "ulysses", "contiguous", "gather", "auto"),
    ("best",),
)
"""Words of the parts of `wlb.policy`."""


def layout(text: str = "") -> list[str]:
    """Overrides of what words say, such as "pp2 dp2 layers4 Interleaved1F1B full". The step of the whole job
    has 4 micro-batches, or as many more as data-parallel ranks need."""
    degrees = dict.fromkeys(DEGREES, 1)
    words, parts = [], ["", "", ""]
    for word in text.split():
        known = word in SHORT or any(word in names for names in POLICIES)
        name, number = (word, "") if known else re.fullmatch(r"([a-z]+)(\d+)", word).groups()
        named = [part for part, names in enumerate(POLICIES) if name in names]
        for part in named:
            parts[part] = OWN.get(name, name)
        if name in degrees:
            degrees[name] = int(number)
        elif not named or name in SHORT:
            words += SHORT[name].format(number).split()
    if any(parts):
        words += ["--wlb.policy", "/".join(parts)]
    local = -(-4 // (degrees["dp"] * degrees["replicas"]))
    for name, degree in degrees.items():
        words += [f"--parallelism.{DEGREES[name]}", str(degree)]
    return [*words, "--training.local_batch_size", str(local), "--training.global_batch_size", "-1"]


def tight(given: Sequence[str], processes: int, folder: Path) -> list[str]:
    """Overrides with a device between what the first step of these takes if layers keep all and if they keep
    least, so that layers of some micro-batches have to repeat more than others."""
    from wlb_titan.config.documents import documents_of, open_corpus
    from wlb_titan.cost.cluster import CLUSTERS
    from wlb_titan.memory.fits import fullest, usable_share
    from wlb_titan.runtime.models.load import load_config
    from wlb_titan.simulator.replicas import peak_memory

    loaded = load_config(CONFIG, given, processes)
    config, job = loaded.config, loaded.job
    job = loaded.told(job.on(replace(job.cluster, kind="gpu")))
    job = replace(job, memory=replace(job.memory, as_needed=False))  # plans without a mix of their own
    corpus = config.wlb.corpus
    plans = job.plans(documents_of(corpus, open_corpus(corpus), config.wlb.validation.hold_out), 1)
    most, least = (
        fullest(peak_memory(replace(job, memory=replace(job.memory, checkpointing=kind)), plans)).total
        for kind in ("none", "full")
    )
    memory = (2 * most + least) / 3 / usable_share(job.packing.owner.slices)
    text = (CLUSTERS / "cpu.toml").read_text().replace('kind = "cpu"', 'kind = "gpu"')  # memory bounds it
    cluster = folder / f"{memory:.0f}.toml"
    text = text.replace("cpu_attention.json", str(CLUSTERS / "cpu_attention.json"))
    cluster.write_text(re.sub("memory = .*", f"memory = {memory}", text, count=1))
    return ["--wlb.cluster", str(cluster)]


def ranks(text: str) -> int:
    """The processes of a layout."""
    return math.prod(int(n) for name, n in re.findall(r"([a-z]+)(\d+)", text) if name in DEGREES)


def make_corpus(texts: Path, output: Path, lengths=None) -> None:
    """Documents of so many words out of 200, so that something can be learned; if not given, 400 documents of
    4 to 1,500 words, most of them short."""
    from wlb_titan.prepare.prepare import PrepareSettings, prepare_corpus

    random = np.random.default_rng(0)
    words = [f"w{i:03d}" for i in range(200)]
    if lengths is None:
        lengths = np.clip(random.lognormal(4.0, 1.2, size=400), 4, 1500).astype(int)
    with open(texts, "w") as file:
        for length in lengths:
            text = " ".join(words[i] for i in np.minimum(random.geometric(0.05, size=length), 200) - 1)
            file.write(json.dumps({"text": text}) + "\n")
    prepare_corpus(PrepareSettings(source=f"jsonl:{texts}#text", vocab_size=500), output)
