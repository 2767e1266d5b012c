"""Bad settings, generated from the schema itself: each key misspelt, of a wrong type, out of range, absurd.
All end in a ConfigError that names the place, the key and the value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from annotated_types import BaseMetadata, Ge, Gt, Le, Lt
from drill_ground import make_corpus

from wlb_titan.config.load import resolve
from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.errors import ConfigError
from wlb_titan.packing import POLICIES
from wlb_titan.pipeline.order import ORDERS
from wlb_titan.runtime.checks import validate_files
from wlb_titan.runtime.models.bases import base_config
from wlb_titan.runtime.models.load import load_config
from wlb_titan.toml.build import dotted
from wlb_titan.toml.values import to_text

BASE = 'base = "llama3_debug"\ntraining.seq_len = 128\n'


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder / "texts", folder / "corpus")
    return folder / "corpus"


@dataclass(frozen=True)
class Key:
    """A setting that TOML can express, and its value without a word."""

    name: str
    value: object
    limits: tuple[BaseMetadata, ...]
    chosen: str
    """The line that names the class whose setting it is; empty where the base has it."""


@pytest.fixture(scope="session")
def schema(tmp_path_factory):
    """All settings, also those of every packing policy, strategy and order."""
    file = tmp_path_factory.mktemp("schema") / "a.toml"
    families = (("", POLICIES), ("plain/", STRATEGIES), ("plain//", ORDERS))
    lines = [f'wlb.policy = "{before}{name}"' for before, family in families for name in family.names]
    keys: dict[str, Key] = {}
    for chosen in ("", *lines):
        file.write_text(f'base = "llama3_debug"\n{chosen}\n')
        for entry in resolve(file, [], base_config).entries:
            if entry.text is not None:
                name = dotted(entry.path)
                keys.setdefault(name, Key(name, entry.value, entry.limits, chosen))
    return list(keys.values())


def cases(schema: list[Key]) -> Iterator[tuple[str, Key, str, str]]:
    """(kind, the key, its name as written, the value as TOML)."""
    for key in schema:
        yield "misspelt", key, f"{key.name}{key.name[-1]}", to_text(key.value)
        for kind, text in bad_values(key.value, key.limits):
            yield kind, key, key.name, text


def bad_values(value: object, limits: tuple[BaseMetadata, ...]) -> Iterator[tuple[str, str]]:
    yield "wrong type", "[[[1]]]"
    if isinstance(value, bool):
        yield "wrong type", '"yes"'
    elif isinstance(value, int | float) or (limits and not isinstance(value, str | list | tuple)):
        yield "wrong type", '"many"'
        for limit in limits:
            match limit:
                case Ge(ge=bound):
                    yield "out of range", to_text(bound - 1)
                case Le(le=bound):
                    yield "out of range", to_text(bound + 1)
                case Gt(gt=bound) | Lt(lt=bound):
                    yield "out of range", to_text(bound)
        yield "absurd", "nan" if isinstance(value, float) else "1" + "0" * 30
        yield "absurd", "-inf" if isinstance(value, float) else "-1" + "0" * 30
    elif not isinstance(value, list | tuple | dict):
        yield "wrong type", "1979-05-27"


def check(folder, corpus, written: str) -> None:
    """What `wlb-titan config check` does with BASE and a few lines more."""
    file = folder / "bad.toml"
    names = [line.split(" ")[0] for line in written.splitlines()]
    base = [*BASE.splitlines(), f'wlb.corpus.path = "{corpus}"']
    lines = [line for line in base if line.split(" ")[0] not in names]
    file.write_text("\n".join([*lines, written]) + "\n")
    loaded = load_config(file)
    loaded.check(lambda config: validate_files(config, loaded.job))


def test_every_key_in_every_wrong_way(schema, corpus, tmp_path):
    """Hundreds of bad inputs; all that are not refused as they should be are named."""
    wrong, count = [], 0
    for kind, key, name, text in cases(schema):
        count += 1
        chooses = key.chosen.split(" ")[0] == name
        try:
            check(tmp_path, corpus, f"{'' if chooses else key.chosen}\n{name} = {text}".strip())
        except ConfigError as error:
            if "bad.toml" not in str(error) or name.split(".")[-1] not in str(error):
                wrong.append(f"{kind}: {name} = {text}: unclear: {error}")
        except Exception as error:
            wrong.append(f"{kind}: {name} = {text}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{kind}: {name} = {text}: accepted")
    assert count > 300
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)


# In range each, and the key by which planner, optimizer or corpus refuses them; more in test_bad_commands.py.
WHOLE = """
wlb.policy = "wlb_lazy"; wlb.packing.max_length = 100              -> wlb.packing.max_length
wlb.corpus.path = "/"                                              -> wlb.corpus.path
wlb.corpus.tokenizer = "/nowhere"                                  -> wlb.corpus.tokenizer
wlb.corpus.sources = [{path = "/nowhere"}]                         -> wlb.corpus.sources.0.path
training.global_batch_size = 4000                                  -> wlb.corpus.path
training.global_batch_size = 3; training.local_batch_size = 2      -> training.global_batch_size
parallelism.tensor_parallel_degree = 3                             -> tensor_parallel_degree
parallelism.context_parallel_degree = 64                           -> training.seq_len
parallelism.pipeline_parallel_degree = 7                           -> parallelism.pipeline_parallel_schedule
parallelism.pipeline_parallel_degree = 2; parallelism.module_fqns_per_model_part = [["norm"]] \
    -> parallelism.module_fqns_per_model_part
parallelism.pipeline_parallel_degree = 2; parallelism.module_fqns_per_model_part = \
    [["tok_embeddings", "layers.2", "layers.3"], ["layers.0", "layers.1", "norm", "lm_head"]] \
    -> parallelism.module_fqns_per_model_part
base = "bases:gpt_oss"; training.mixed_precision_param = "float32" -> training.mixed_precision_param
base = "bases:qwen3_moe"; parallelism.data_parallel_shard_degree = 5 -> parallelism.data_parallel_shard_degree
compile.components = ["modle"]                                     -> compile.components
checkpoint.enable = true; checkpoint.load_step = 7                 -> checkpoint.load_step
checkpoint.enable = true; checkpoint.initial_load_path = "/nowhere" -> checkpoint.initial_load_path
optimizer.param_groups.0.optimizer_kwargs.lr = "big"               -> optimizer_kwargs.lr
optimizer.param_groups.0.optimizer_kwargs.lrr = 0.1                -> optimizer_kwargs.lrr
optimizer.param_groups.0.optimizer_kwargs.betas = [0.9, 1.5]       -> optimizer_kwargs.betas
optimizer.param_groups.0.optimizer_name = "AdamX"                  -> optimizer_name
loss.num_chunks = 7                                                -> training.seq_len
parallelism.pipeline_parallel_schedule_csv = "a.csv"               -> pipeline_parallel_schedule_csv
wlb.validation.hold_out = 0.9999                                   -> wlb.validation.hold_out
checkpoint.enable = true; checkpoint.initial_load_in_hf = true     -> initial_load_in_hf reads
wlb.device = "cpu"; training.enable_cpu_offload = true             -> training.enable_cpu_offload
wlb.device = "cpu"; optimizer.implementation = "fused_opt_states_bf16" -> optimizer.implementation
profiler.enable_profiling = true; profiler.profile_freq = 3        -> profiler.profile_freq
wlb.device = "cpu"; training.gc_debug = true                       -> training.gc_debug
wlb.device = "cpu"; profiler.enable_memory_snapshot = true         -> profiler.enable_memory_snapshot
wlb.device = "cpu"; checkpoint.async_mode = "async_with_pinned_mem" -> checkpoint.async_mode
dump_folder = "/dev/null/x"                                        -> dump_folder
dump_folder = "/etc/passwd"                                        -> dump_folder
"""


@pytest.mark.parametrize("case", WHOLE.strip().splitlines())
def test_what_only_the_whole_can_refuse_is_refused_by_its_key(corpus, tmp_path, case):
    lines, _, key = case.rpartition("->")
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, corpus, "\n".join(line.strip() for line in lines.split(";")))
    assert "bad.toml" in str(caught.value) and key.strip() in str(caught.value), caught.value
