"""What the pipeline benchmarks share: two stages, one core each, and trainers whose steps can be interleaved.

A benchmark starts itself once for each stage (`in_two_processes`). All its trainers live in these two
processes, on one mesh, and take turns: each step is timed from one barrier to the next, so that what else the
machine does falls on all of them alike.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402

from wlb_titan.corpus import Corpus  # noqa: E402
from wlb_titan.corpus.prepare import prepare_corpus  # noqa: E402
from wlb_titan.corpus.settings import PrepareSettings  # noqa: E402
from wlb_titan.runtime.models.registry import base_config  # noqa: E402
from wlb_titan.runtime.trainer import Trainer  # noqa: E402

STAGES = 2
VOCABULARY = 512


def in_two_processes() -> bool:
    """Whether this is one of the two; if not, they have run when this returns. Pins a stage to its core.

    Raises:
        SystemExit: a stage failed.
    """
    if "RANK" in os.environ:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= STAGES:
            os.sched_setaffinity(0, {cores[int(os.environ["RANK"])]})
        torch.set_num_threads(1)
        return True
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={STAGES}"]
    result = subprocess.run([*words, *sys.argv], env={**os.environ, "OMP_NUM_THREADS": "1"})
    if result.returncode:
        sys.exit(result.returncode)
    return False


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Joins the two processes and gives both one temporary folder."""
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as own:
        path = [own]
        dist.broadcast_object_list(path)
        yield Path(path[0])
        dist.barrier()


class BenchTrainer(Trainer):
    """A trainer that runs one step when it is told to, on the mesh of the first one.

    DTensor remembers how an operation is sharded together with the mesh, so all trainers share one.
    """

    known: ClassVar[dict[str, ParallelDims]] = {}

    def __init__(self, config: Trainer.Config) -> None:
        super().__init__(config)
        if self.parallel_dims.pp_enabled:
            return
        self.model_parts[0].register_forward_hook(lambda *_: self._marks.append(time.thread_time()))
        loss_fn = self.loss_fn

        def marked_loss(*arguments: Any, **keywords: Any) -> Any:
            result = loss_fn(*arguments, **keywords)
            self._marks.append(time.thread_time())
            return result

        self.loss_fn = marked_loss

    def init_distributed(self) -> ParallelDims:
        return self.known.setdefault("dims", super().init_distributed())

    def timed_step(self, *, passes: bool = False) -> float:
        """Trains one step; its seconds, from a barrier to the next. `passes`: measure those too."""
        if not hasattr(self, "_batches"):
            self._batches: Iterator[Any] = self.batch_generator(self.dataloader)
        self.step += 1
        self.computed: list[np.ndarray] = []
        dist.barrier()
        if passes:
            self.timer.start()
        begin = time.perf_counter()
        self.train_step(self._batches)
        dist.barrier()
        seconds = time.perf_counter() - begin
        if passes:
            self.passes = self.timer.stop()
        return seconds

    def forward_backward_step(self, **arguments: Any) -> torch.Tensor:
        """As the trainer's; `self.computed` gets its processor times, which leave waiting out.

        Without a pipeline an array (3,): of the layers' forward pass, of head and loss in both directions,
        and of the layers' backward pass.
        """
        self._marks = [time.thread_time()]
        loss = super().forward_backward_step(**arguments)
        self._marks.append(time.thread_time())
        self.computed.append(np.diff(self._marks))
        return loss


def make_config(
    folder: Path, name: str, *, window: int, micro_batches: int, layers: int, replicas: int = 1
) -> Trainer.Config:
    """A small Llama in float32 on `replicas` data-parallel ranks under FSDP, or else on two stages.

    Without checkpoints of any kind. `micro_batches` are those of a step of the whole job.
    """
    config = base_config("llama3_debug")
    spec = config.model_spec
    assert spec is not None
    model = copy.deepcopy(spec.model)
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCABULARY
    model.layers = [copy.deepcopy(model.layers[0]) for _ in range(layers)]
    config.model_spec = dataclasses.replace(spec, model=model)
    config.loss.loss_fn.global_vocab_size = VOCABULARY
    config.activation_checkpoint = None
    config.training = dataclasses.replace(
        config.training,
        seq_len=window,
        local_batch_size=micro_batches // replicas,
        global_batch_size=-1,
        steps=10**6,
    )
    config.parallelism = dataclasses.replace(
        config.parallelism,
        pipeline_parallel_degree=STAGES if replicas == 1 else 1,
        data_parallel_shard_degree=replicas,
    )
    config.metrics = dataclasses.replace(config.metrics, log_freq=10**6)
    config.debug = dataclasses.replace(config.debug, enable_structured_logging=False, seed=0)
    config.wlb.corpus.path = str(folder / "corpus")
    config.wlb.corpus.seed = None  # the corpus in its own order
    config.dump_folder = str(folder / name)
    return config


def make_corpus(folder: Path, windows: int, *, window: int, sigma: float, median: float) -> Corpus:
    """Windows of exactly so many tokens, each made of whole documents with lognormal lengths.

    So `plain`, which cuts documents at the end of a window, cuts none, and all policies train on the same
    documents with the same work. Call it on every rank.
    """
    if dist.get_rank() == 0:
        random = np.random.default_rng(0)
        lengths = np.concatenate([_window(random, window, sigma, median) for _ in range(windows)])
        settings = PrepareSettings(source=f"jsonl:{folder / 'texts.jsonl'}#text", tokenizer=str(folder))
        # Preparing shuffles: the texts are written so that shuffling brings them into this order.
        order = np.random.default_rng(settings.seed).permutation(len(lengths))
        shuffled = np.empty_like(lengths)
        shuffled[order] = lengths
        with open(folder / "texts.jsonl", "w") as file:
            for length in shuffled:
                text = " ".join(f"w{word}" for word in random.integers(500, size=length - 1))
                file.write(json.dumps({"text": text}) + "\n")
        _write_tokenizer(folder)
        corpus = prepare_corpus(settings, folder / "corpus")
        assert np.array_equal(corpus.lengths, lengths), "the documents are not those that were asked for"
    dist.barrier()
    return Corpus.open(str(folder / "corpus"))


def _write_tokenizer(folder: Path) -> None:
    """One token a word."""
    vocabulary = {f"w{word}": word for word in range(500)} | {"<end>": 500}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def _window(random: np.random.Generator, window: int, sigma: float, median: float) -> np.ndarray:
    lengths: list[int] = []
    while (left := window - sum(lengths)) > 0:
        length = int(np.clip(random.lognormal(np.log(median), sigma), 16, left))
        lengths.append(left if left - length < 16 else length)
    return random.permutation(lengths)
