"""Preparing with many workers, here or on a cluster: datatrove's executors run the parts as tasks.

The source is cut into parts that follow from the source alone (`Source.parts`). A task reads one part,
shuffles its documents, tokenizes them and writes documents-00017.arrow and what is to be known of it; at the
end the manifest is put together and the corpus moved to its place. So the corpus is the same, byte for byte,
whatever runs the tasks and however many at a time. Tasks that are done are not done again: datatrove notes
them, and the next preparation with the same settings goes on.

    .corpus.partial/     documents-*.arrow and *.json, tokenizer, parts/ (what each task reads)
    .corpus.logs/        of datatrove: which tasks are done, and their logs
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import pickle
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wlb_titan.corpus.arrow import write_checks
from wlb_titan.corpus.corpus import Corpus
from wlb_titan.corpus.existing import complete_corpus
from wlb_titan.corpus.folder import finish, partial_folder, unfinished
from wlb_titan.corpus.manifest import MANIFEST_FILE, PART_FILE, TOKENIZER_FOLDER, Manifest
from wlb_titan.corpus.prepare import (
    CACHE_FOLDER,
    Part,
    Report,
    complete,
    documents_of,
    make_tokenizer,
    write_part,
)
from wlb_titan.corpus.replace import check_replaceable, output_folder
from wlb_titan.corpus.settings import PrepareSettings
from wlb_titan.corpus.sources import Source, open_source
from wlb_titan.corpus.tokenizer import TRAINING_CHARACTERS, CorpusTokenizer, training_texts
from wlb_titan.errors import CorpusError

CLASSES = {
    "local": ("datatrove.executor.local", "LocalPipelineExecutor"),
    "slurm": ("datatrove.executor.slurm", "SlurmPipelineExecutor"),
    "ray": ("datatrove.executor.ray", "RayPipelineExecutor"),
}
PARTS_FOLDER = "parts"
SAMPLED_PARTS = 16
"""A tokenizer is trained on documents of so many parts."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """What runs the tasks.

    Attributes:
        executor: `local`, `slurm` or `ray`.
        workers: tasks that run at a time; -1 is all.
        options: further arguments of datatrove's executor, such as a Slurm partition, as text.
    """

    executor: str = "local"
    workers: int = -1
    options: dict[str, str] = field(default_factory=dict)


def prepare_in_parts(
    settings: PrepareSettings,
    output: str | Path,
    workers: Workers,
    *,
    overwrite: bool = False,
    report: Report = lambda what, done, total: None,
) -> Corpus | None:
    """Make the corpus `output` with datatrove, or go on with making it.

    Args:
        settings: what to make; without `max_tokens`, as no task knows what the others have.
        output: the corpus folder, which all workers must reach at this path.
        workers: what runs the tasks.
        overwrite: replace a corpus that is there.
        report: told what is being done.

    Returns:
        The corpus; None where the tasks were submitted and run later.

    Raises:
        CorpusError: as `prepare_corpus`; or datatrove is not installed, or an option is unknown.
    """
    if settings.max_tokens is not None:
        raise CorpusError(
            "max_tokens is met by counting in order, which tasks side by side cannot; leave it out."
        )
    executor, options = _executor(workers)
    output = output_folder(output)
    if overwrite:
        check_replaceable(output)
    elif corpus := complete_corpus(settings, output):
        return corpus
    with unfinished(output, settings.resolved()) as folder:
        logs = logs_folder(output)
        tasks = _write_parts(settings, folder, logs, report)
        report(f"Tokenizing {tasks:,} parts", 0, 0)
        write = executor(
            pipeline=[WritePart(folder, settings)],
            tasks=tasks,
            logging_dir=str(logs / "parts"),
            **options,
        )
        end = Finish(settings, output, overwrite)
        if workers.executor == "slurm":
            last = {**options, "workers": 1, "depends": write, "skip_completed": False}
            executor(pipeline=[end], tasks=1, logging_dir=str(logs / "finish"), **last).run()
            return None
        try:
            if not (folder / MANIFEST_FILE).exists():  # it was only not moved yet
                write.run()
            end(None)
        except OSError as error:
            raise CorpusError(
                f"{output} cannot be written: {error}. What is done is kept; call the same command to go on."
            ) from error
        shutil.rmtree(logs)
    return Corpus.open(output)


def logs_folder(output: Path) -> Path:
    """Where datatrove notes what it has done for the corpus `output`."""
    return output.with_name(f".{output.name}.logs")


class WritePart:
    """A step of datatrove's: task `rank` writes part `rank`."""

    def __init__(self, folder: Path, settings: PrepareSettings) -> None:
        self._folder = folder
        self._settings = settings

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        # The tasks take the cores; threads of the tokenizer in each of them would only be in the way.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        source: Source = pickle.loads((self._folder / PARTS_FOLDER / f"{rank:05d}").read_bytes())
        order = np.random.default_rng((self._settings.seed, rank)).permutation(len(source)).tolist()
        path = self._folder / PART_FILE.format(rank)
        # A task that was taken for dead may still write the same; each has a file of its own until the end.
        writing = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
        tokenizer = CorpusTokenizer(self._folder / TOKENIZER_FOLDER)
        part = write_part(documents_of(self._settings, source, order, tokenizer), writing)
        facts = path.with_suffix(".json")
        facts.write_text(json.dumps(dataclasses.asdict(part)), encoding="utf-8")
        writing.rename(path)
        write_checks(path)


class Finish:
    """A step of datatrove's: makes a corpus of the parts, when all are there."""

    def __init__(self, settings: PrepareSettings, output: Path, overwrite: bool) -> None:
        self._settings = settings
        self._output = output
        self._overwrite = overwrite

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        folder = partial_folder(self._output)
        facts = [
            folder / PART_FILE.format(part).replace(".arrow", ".json")
            for part in range(len(os.listdir(folder / PARTS_FOLDER)))
        ]
        if missing := [path for path in facts if not path.with_suffix(".arrow").exists()]:
            raise CorpusError(
                f"{len(missing):,} of {len(facts):,} parts are missing in {folder}, such as "
                f"{missing[0].stem}: their tasks have failed, and the logs in "
                f"{logs_folder(self._output)} say why. Call `wlb-titan prepare` again with the same "
                "options; it does only what is missing."
            )
        parts = [Part(**json.loads(path.read_text(encoding="utf-8"))) for path in facts]
        complete(self._settings, folder, CorpusTokenizer(folder / TOKENIZER_FOLDER), parts)
        belonging = {Path(name).parts[0] for name in Manifest.load(folder).files}
        finish(self._output, replace=self._overwrite, keep=belonging | {MANIFEST_FILE})


def _write_parts(settings: PrepareSettings, folder: Path, logs: Path, report: Report) -> int:
    """Cuts the source, one file for each part, and makes the tokenizer, unless that was done before.

    Returns:
        How many parts there are.
    """
    place = folder / PARTS_FOLDER
    if not place.exists():
        report("Finding documents", 0, 0)
        absolute = settings.spec.absolute()  # tasks may run in another folder
        source = open_source(dataclasses.replace(settings, source=absolute), folder / CACHE_FOLDER)
        parts = source.parts()
        if not parts:
            raise CorpusError(
                f"The source {settings.source} has no documents, so there is nothing to prepare."
            )
        report("Preparing the tokenizer", 0, 0)
        shutil.rmtree(folder / TOKENIZER_FOLDER, ignore_errors=True)
        make_tokenizer(settings, _sample(parts, settings.seed), folder / TOKENIZER_FOLDER)
        shutil.rmtree(logs, ignore_errors=True)  # of other parts
        writing = folder / f"{PARTS_FOLDER}.writing"
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir()
        for number, part in enumerate(parts):
            (writing / f"{number:05d}").write_bytes(pickle.dumps(part))
        writing.rename(place)
    return len(os.listdir(place))


def _sample(parts: list[Source], seed: int) -> Iterator[str]:
    """Texts that a tokenizer is trained on, from documents of some parts."""
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(len(parts))[:SAMPLED_PARTS]
    for number in chosen:
        part = parts[number]
        order = rng.permutation(len(part)).tolist()
        yield from training_texts(part, order, TRAINING_CHARACTERS // len(chosen))


def _executor(workers: Workers) -> tuple[Any, dict[str, Any]]:
    """datatrove's class, and its arguments."""
    module, name = CLASSES[workers.executor]
    try:
        executor = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise CorpusError(
            f"--executor needs datatrove, which is not installed ({error}); install wlb-titan[prepare]."
        ) from error
    known = inspect.signature(executor).parameters
    own = {"pipeline", "tasks", "workers", "logging_dir", "depends", "skip_completed"}
    arguments: dict[str, Any] = {"workers": workers.workers}
    for option, text in workers.options.items():
        if option not in known or option in own:
            names = ", ".join(sorted(set(known) - own))
            raise CorpusError(f"datatrove's {name} has no option {option!r}; it has {names}.")
        default = known[option].default
        try:
            arguments[option] = type(default)(text) if isinstance(default, int | float) else text
        except ValueError as error:
            raise CorpusError(f"The option {option} of {name} must be a number, not {text!r}.") from error
    missing = [n for n, p in known.items() if p.default is p.empty and n not in {*own, *arguments}]
    if missing:
        raise CorpusError(
            f"datatrove's {name} also needs {' and '.join(missing)}: --executor-option {missing[0]}=..."
        )
    return executor, arguments
