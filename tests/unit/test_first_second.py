"""What `config check` accepts no rank refuses: each shipped configuration, and layouts drawn at random, go
through it, and then through what ranks do until their first step and their first validation begin."""

import random
import sys
from pathlib import Path

import pytest
import torch
from forking import Rank
from lab import rows

from wlb_titan.config.documents import open_corpus, training_documents
from wlb_titan.errors import UserError
from wlb_titan.prepare.prepare import long_tailed_lengths, write_synthetic_corpus
from wlb_titan.runtime.checks import validate_files
from wlb_titan.runtime.dataloader import PlannedDataLoader
from wlb_titan.runtime.models.load import load_config
from wlb_titan.runtime.one_rank.dry_run import DryTrainer
from wlb_titan.runtime.validator import Validator

pytestmark = pytest.mark.slow

SHIPPED = sorted(path.stem for path in Path("train_configs").glob("*.toml"))
SMALL = """
base = "bases:llama"
training = { local_batch_size = 1, mixed_precision_param = "bfloat16" }
parallelism.data_parallel_shard_degree = 1
"""
EXPERTS = ("qwen3_moe", "deepseek_v3", "gpt_oss")
VALIDATED = (("every", 0), ("hold_out", 0.01, 0.2), ("path", "few1", "few5"))


def main():
    """In a process of its own: plans and micro-batches of the first step and validation, on two ranks, and
    the last rank's model, its weights and stages divided, on fake tensors."""
    loaded = load_config(sys.argv[1], sys.argv[2:])
    config, job, wlb = loaded.config, loaded.job, loaded.config.wlb
    ranks = job.degrees.ranks
    corpus = open_corpus(wlb.corpus)
    documents = training_documents(wlb, corpus)
    for rank in {0, ranks - 1}:
        settings = PlannedDataLoader.Config(corpus=corpus, documents=documents, job=job, rank=rank)
        loader, validator = PlannedDataLoader(settings), Validator(Validator.Config())
        if wlb.validation.enabled:
            validator.prepare(wlb, settings, 1, torch.device("cpu"))
        for steps in (iter(loader), *(steps for _, steps in validator._sources.values())):
            assert next(steps).items
        loader.close()
        validator.close()
    DryTrainer(config, rank=ranks - 1, world_size=ranks).close()


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Documents to train on, and few to validate on."""
    folder = tmp_path_factory.mktemp("corpora")
    write_synthetic_corpus(folder / "many", long_tailed_lengths(1 << 21, 4096))
    for few in (1, 5):
        write_synthetic_corpus(folder / f"few{few}", long_tailed_lengths(1 << 12, 512)[:few].clip(2))
    return folder


@pytest.fixture
def begins(fork_server, corpora, tmp_path):
    """Whether a configuration is accepted; if it is, it has to begin."""

    def begins(file, words):
        words = [str(file), "--wlb.corpus.path", str(corpora / "many"), *words]
        try:
            loaded = load_config(words[0], words[1:])
            config, ranks = loaded.config, loaded.job.degrees.ranks
            validate_files(config, loaded.job)
        except UserError:
            return False
        place, log = {"RANK": str(ranks - 1), "WORLD_SIZE": str(ranks)}, tmp_path / "log"
        job = fork_server.start([Rank(words, log)], "test_first_second", environment=place)
        assert job.wait(300) == [0], f"{' '.join(words)}\n{log.read_text()}"
        return True

    return begins


@pytest.mark.parametrize("name", rows(SHIPPED, {*SHIPPED} - {"cpu_pipeline_slices", "llama2_550m_64k"}))
def test_a_shipped_configuration_begins(name, begins):
    words = ["--training.seq_len", "4096", "--checkpoint.initial_load_in_hf", "false"]
    words += ["--checkpoint.initial_load_path", "", "--checkpoint.last_save_in_hf", "false"]
    assert begins(Path("train_configs") / f"{name}.toml", words)


def drawn(seed, corpora):
    """Overrides of a layout, which may have to be refused."""
    rng = random.Random(seed)
    one_of = lambda *values: str(rng.choice(values))  # noqa: E731
    base = rng.choice(("llama", "layers8", "qwen3", "lora", *EXPERTS, *EXPERTS))
    keys = {
        "base": f"bases:{base}",
        "training.seq_len": one_of(64, 256, 384),
        "training.local_batch_size": one_of(1, 2, 4),
        "loss.num_chunks": one_of(1, 8),
        "wlb.policy": one_of("plain", "wlb_lazy", "fixed_greedy", "slim", "wlb_lazy/hybrid", "dealt/ulysses"),
        "parallelism.tensor_parallel_degree": one_of(1, 1, 2),
        "parallelism.context_parallel_degree": one_of(1, 2, 4),
        "parallelism.pipeline_parallel_degree": one_of(1, 1, 2),
        "parallelism.data_parallel_shard_degree": one_of(1, 2, 3, 6),
        "parallelism.data_parallel_replicate_degree": one_of(1, 1, 2),
        "parallelism.enable_sequence_parallel": one_of("true", "false"),
        "parallelism.expert_parallel_degree": one_of(1, 2, 4) if base in EXPERTS else "1",
    }
    key, *values = rng.choice(VALIDATED)
    keys[f"wlb.validation.{key}"] = one_of(*values).replace("few", str(corpora / "few"))
    return [word for key, value in keys.items() for word in (f"--{key}", value)]


@pytest.mark.parametrize("seeds", rows(("0:6", "6:18", "18:30", "30:42"), {"6:18", "18:30", "30:42"}))
def test_layouts_that_are_accepted_begin(seeds, begins, corpora, tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    seeds = range(*map(int, seeds.split(":")))
    begun = [begins(tmp_path / "small.toml", drawn(seed, corpora)) for seed in seeds]
    assert any(begun) and not all(begun)
