"""What `config check` accepts no rank refuses: each shipped configuration, and layouts drawn at random, go
through it, and then through what ranks do until their first step and their first validation begin."""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rows import rows

from wlb_titan.errors import UserError
from wlb_titan.prepare.prepare import long_tailed_lengths, write_synthetic_corpus
from wlb_titan.runtime.checks import validate_files
from wlb_titan.runtime.configured import degrees_product, job_of, parallel_dims
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
BASES = ("llama", "layers8", "qwen3", "lora", "qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Documents to train on, and few to validate on, of which one has two tokens alone."""
    folder = tmp_path_factory.mktemp("corpora")
    write_synthetic_corpus(folder / "many", long_tailed_lengths(1 << 21, 4096))
    for few in (1, 5):
        write_synthetic_corpus(folder / f"few{few}", long_tailed_lengths(1 << 12, 512)[:few].clip(2))
    return folder


@pytest.fixture
def begins(corpora, monkeypatch):
    """Makes the plans of a first step and validation, their items on two ranks, and a rank's part of the
    model on fake tensors; says whether the configuration is accepted. With `runs` it also runs the step."""

    def begins(file, words, runs):
        try:
            config = load_config(file, ["--wlb.corpus.path", str(corpora / "many"), *words]).config
            ranks = degrees_product(config)
            validate_files(config, ranks)
        except UserError:
            return False
        job, wlb = job_of(config, parallel_dims(config, ranks)), config.wlb
        degrees = job.degrees
        for data, context in {(0, 0), (degrees.data - 1, degrees.context - 1)}:
            settings = PlannedDataLoader.Config(
                corpus=wlb.corpus, job=job, context_rank=context, hold_out=wlb.validation.hold_out, alone=True
            )
            loader = settings.build(dp_world_size=degrees.data, dp_rank=data)
            validator = Validator(Validator.Config(), dp_rank=data)
            if wlb.validation.enabled:
                validator.prepare(wlb, settings, 1, torch.device("cpu"))
            for steps in (iter(loader), *(steps for _, steps in validator._sources.values())):
                lengths = [item.labels.shape[1] for item in next(steps).items]
                # Experts in parallel, the loss in chunks and sequence parallelism divide them.
                assert not any(length % (degrees.tensor if degrees.expert > 1 else 1) for length in lengths)
            loader.close()
            validator.close()
        for name, value in {"RANK": ranks - 1, "LOCAL_RANK": 0, "WORLD_SIZE": ranks}.items():
            monkeypatch.setenv(name, str(value))
        trainer = DryTrainer(config, rank=ranks - 1, world_size=ranks)
        try:
            if runs:
                trainer.run()
        finally:
            trainer.close()
            dist.destroy_process_group()
        return True

    return begins


@pytest.mark.parametrize("name", rows(SHIPPED, {*SHIPPED} - {"cpu_pipeline_slices", "llama2_550m_64k"}))
def test_a_shipped_configuration_begins(name, begins):
    words = ["--training.seq_len", "4096", "--checkpoint.initial_load_in_hf", "false"]
    words += ["--checkpoint.initial_load_path", "", "--checkpoint.last_save_in_hf", "false"]
    assert begins(Path("train_configs") / f"{name}.toml", words, runs=False)


def drawn(seed, corpora):
    """Overrides of a layout, some of which are to be refused."""
    rng = random.Random(seed)
    one_of = lambda *values: str(rng.choice(values))  # noqa: E731
    base = rng.choice(BASES)
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
    }
    if base in BASES[-3:]:
        keys["parallelism.expert_parallel_degree"] = one_of(1, 2, 4)
    keys |= rng.choice(
        [
            {},
            {"wlb.validation.hold_out": one_of(0.01, 0.2)},
            {"wlb.validation.path": str(corpora / one_of("few1", "few5"))},
        ]
    )
    return [word for key, value in keys.items() for word in (f"--{key}", value)]


@pytest.mark.parametrize("seeds", rows(("0:4", "4:16", "16:28", "28:40"), {"4:16", "16:28", "28:40"}))
def test_layouts_that_are_accepted_begin(seeds, begins, corpora, tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    drawn_words = {seed: drawn(seed, corpora) for seed in range(*map(int, seeds.split(":")))}
    begun = []
    for seed, words in drawn_words.items():
        try:
            begun.append(begins(tmp_path / "small.toml", words, runs=True))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {' '.join(words)}") from error
    assert any(begun) and not all(begun)
