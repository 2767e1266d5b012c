"""`wlb-titan simulate`: table, search, timeline. Page: test_pages.py; mistakes: test_bad_commands.py."""

import json
import re
import shlex
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import planning
import pytest
from commands import CONFIGS, invoke
from test_checked_files import LLAMA_3_1_8B
from torchtitan.config import ParallelismConfig

from wlb_titan.commands import search as searching
from wlb_titan.commands.command_line import load_job
from wlb_titan.commands.search import winner_words, write_best
from wlb_titan.commands.simulate_page import remedies, timed
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.cost.profile import Entry, Profile
from wlb_titan.job import Policy
from wlb_titan.pipeline.schedule import layers_of_stages
from wlb_titan.prepare.prepare import write_synthetic_corpus
from wlb_titan.runtime.checks import validate_inputs
from wlb_titan.runtime.models.load import load_config
from wlb_titan.runtime.pipeline.build import keys_of_stages, stage_names
from wlb_titan.simulator.choice import Scenario
from wlb_titan.simulator.search import candidates

pytestmark = pytest.mark.slow

SMALL = [CONFIGS / "llama2_550m_64k.toml", "--training.seq_len", 16384, "--steps", 2]


@pytest.fixture
def lengths(tmp_path):
    values = (np.random.default_rng(0).pareto(0.9, 4000) * 200 + 20).clip(20, 16384).astype(int)
    path = tmp_path / "lengths.txt"
    np.savetxt(path, values, fmt="%d")
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A training configuration on a small corpus."""
    folder = tmp_path_factory.mktemp("simulate")
    write_synthetic_corpus(folder / "corpus", 4 * (10 + 13 * np.arange(40)) + 1)
    path = folder / "train.toml"
    path.write_text(f'extends = "{CONFIGS / "cpu_debug.toml"}"\nwlb.corpus.path = "{folder / "corpus"}"\n')
    return path


def run(*arguments, code=0):
    result = invoke("simulate", *arguments)
    assert result.exit_code == code and (code or not result.stderr), result.output
    return result.output


def test_a_table_has_a_row_for_each_policy_and_a_timeline_the_passes(lengths, tmp_path, on_terminal):
    policies = ["plain/per_sequence", "fixed_greedy/per_sequence", "wlb/adaptive", "wlb_lazy/hybrid/best"]
    drawn = ["--trace", tmp_path / "t.json"]
    (tmp_path / "t.json").touch()  # as mktemp leaves it
    words = ("--lengths", lengths, "--policies", ",".join(policies), *drawn)
    said, shown = on_terminal("simulate", *SMALL, *words)
    assert shown == {f"Planning {policy}" for policy in policies}
    run(*SMALL, "--lengths", lengths, "--steps", 1, *drawn)  # its own file is replaced
    assert "TP 2 x CP 2 x PP 4 x DP 2 = 32 ranks" in said
    rows = [line.split() for line in said.splitlines() if re.match(r"\s+(plain|fixed|wlb)", line)]
    assert [row[0] for row in rows] == policies
    assert rows[0][-2:] == ["1.000x", "1.000x"]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"F0", "B0"}


def test_a_cluster_whose_profile_lacks_the_attention_says_how_to_measure_it(lengths):
    said = run(CONFIGS / "llama2_7b_64k.toml", "--lengths", lengths, "--cluster", "cpu", "--steps", 1, code=1)
    assert "plain/per_sequence does not fit" in said
    assert "no attention of head dim 128" in said and "wlb-titan profile FILE" in said
    assert "scaled to the attention rates of CPU" in said


def test_other_gpus_are_predicted_with_torchs_attention(lengths):
    seconds = {}
    for cluster in ("b200", "h100_roce", "a100", "l40s"):
        file = CONFIGS / "llama3_8b_128k.toml"
        said = run(file, "--lengths", lengths, "--cluster", cluster, "--steps", 1, "--policies", "plain")
        seconds[cluster] = float(re.search(r"plain/per_sequence +([.\d]+)", said)[1])
        assert ("Torch's forward and Torch's backward" in " ".join(said.split())) == (cluster != "h100_roce")
    assert list(seconds) == sorted(seconds, key=seconds.get)


def test_search_ranks_what_fits_and_was_tried_in_time(lengths, on_terminal, monkeypatch):
    monkeypatch.setattr(searching, "time", SimpleNamespace(monotonic=count().__next__))
    monkeypatch.setattr(searching, "SEARCH_SECONDS", 5)
    policies = "plain,wlb_lazy/adaptive"
    words = ("--lengths", lengths, "--search", "--world-size", 8, "--policies", policies)
    said, shown = on_terminal("simulate", *SMALL, *words)
    assert shown == {"Trying ways to run the job"}
    shares = [float(share) for share in re.findall(r"(\d+\.\d)%\s*$", said, re.M)]
    assert len(shares) > 3 and shares == sorted(shares, reverse=True)
    assert "No gain is reported" in said
    assert re.search(r"There was no time in 5 s for \d+ other ways to run the job", said)


def test_search_says_what_the_best_gains_over_the_degrees_that_are_typed():
    degrees = ["--parallelism.tensor_parallel_degree", 4, "--parallelism.context_parallel_degree", 1]
    said = run(*SMALL, "--lengths", "web", "--search", "--policies", "plain", *degrees)
    times = r"\d\.\d\dx"
    gain = rf"does {times} the FLOPs and {times} the tokens a second of the configured job at its best \(TP 4"
    assert re.search(gain, said)


def test_the_winner_of_a_search_is_told_as_overrides(config):
    words = ["--training.global_batch_size", 8, "--policies", "plain,wlb_lazy/hybrid/best", "--steps", 1]
    said = run(config, "--search", "--world-size", 4, *words)
    degrees, policy = re.search(r"^\s+(TP .*?DP \d+)\s.*?(\w+/\w+(/best)?)", said, re.M).group(1, 2)
    overrides = shlex.split(re.search(r"^To run it: (.*)$", said, re.M)[1])
    resolved = load_config(config, ["--training.global_batch_size", "8", *overrides], world_size=4)
    resolved.check(validate_inputs)
    job = resolved.job
    assert (str(job.degrees), str(job.policy), job.micro_batches) == (degrees, policy, 8)
    assert not any(word.endswith("global_batch_size") for word in overrides), "it has that already"


def test_the_winner_of_a_search_is_a_file_that_extends_the_jobs(config, tmp_path, monkeypatch):
    """Written by a path from one folder and read by a path from another."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "tuned").mkdir()
    job = tmp_path / "jobs" / "job.toml"
    job.write_text(f'extends = "{config}"\ndump_folder = "outputs/first"\n')
    monkeypatch.chdir(tmp_path)
    words = ["--training.global_batch_size", 8, "--policies", "wlb_lazy/hybrid/best", "--steps", 1]
    searched = ["jobs/job.toml", "--search", "--world-size", 4, *words]
    said = run(*searched, "--write", "tuned/best.toml")
    assert "To run it: wlb-titan train tuned/best.toml" in said
    text = (tmp_path / "tuned" / "best.toml").read_text()
    assert text.startswith('extends = "../jobs/job.toml"\ndump_folder = "outputs/best"\n')
    assert "exists. Remove it" in invoke("simulate", *searched, "--write", "tuned/best.toml").stderr
    monkeypatch.chdir(job.parent)
    best = load_config("../tuned/best.toml", world_size=4)
    row = re.search(r"^\s+(TP .*?DP \d+)\s.*?(\w+/\w+(/best)?)\s+([\d,]+)", said, re.M)
    found = (best.job.degrees, best.job.policy, f"{best.job.longest_micro_batch:,}")
    assert tuple(map(str, found)) == row.group(1, 2, 4)
    assert (best.job.micro_batches, best.config.training.global_batch_size) == (8, 8)


def test_every_pipeline_that_is_searched_can_be_told(config, tmp_path):
    typed = ["--training.global_batch_size", "8"]
    asked = load_job(config, typed)
    job = replace(asked.job, model=replace(asked.job.model, layers=4))
    piped = [each for each in candidates(job, 2) if each.degrees.pipeline == 2]
    assert {each.schedule for each in piped} >= {"1F1B", "Interleaved1F1B"}
    for each in piped:
        found = load_config(config, [*typed, *winner_words(each, asked.loaded)], world_size=2).job
        assert (found.degrees, found.policy, found.shape) == (each.degrees, each.policy, each.shape)
        assert found.schedule == each.schedule
    write_best(tmp_path / "best.toml", winner_words(each, asked.loaded), asked.loaded, 2)
    assert load_config(tmp_path / "best.toml", world_size=2).job == found


@pytest.mark.parametrize(("layers", "stages"), [(32, 4), (32, 8), (86, 16), (28, 8), (30, 16)])
def test_stages_are_written_as_they_are_searched(layers, stages):
    """28 layers on 8 stages, 3.75 on each with embedding and head, come from no number of layers a stage."""
    pipeline = {"pipeline_parallel_degree": stages // 2, "pipeline_parallel_schedule": "Interleaved1F1B"}
    settings = ParallelismConfig(**pipeline, **keys_of_stages(layers, stages))
    names = stage_names(settings, SimpleNamespace(layers=[None] * layers))
    found = [sum(name.startswith("layers.") for name in stage) for stage in names]
    assert found == list(layers_of_stages(layers, stages))


def test_a_profile_is_what_attention_takes(tmp_path):
    kernel = planning.UNMERGED
    seconds = []
    for name, factor in (("fast", 1), ("slow", 4)):
        costs = {"forward": kernel.forward.slower(factor), "backward": kernel.backward.slower(factor)}
        entries = [Entry(128, 1, "bfloat16", direction, cost, (), name) for direction, cost in costs.items()]
        file = tmp_path / f"{name}.json"
        Profile("some GPU", kernel.units, "", tuple(entries)).save(file)
        said = run(*SMALL, "--lengths", "code", "--policies", "plain", "--wlb.context.profile", file)
        seconds.append(float(re.search(r"plain/per_sequence\s+(\S+)", said)[1]))
    assert seconds[0] < seconds[1]


SHORT = ["--training.seq_len", "16384"]
GROUPS = ["--wlb.context.groups", "auto"]
WIDE = ["--parallelism.pipeline_parallel_degree", "1", "--parallelism.context_parallel_degree", "8"]
JOBS = {  # file, overrides, and what is tried, by a part of the command
    "pipeline": ("llama2_550m_64k", SHORT, "slim/hybrid batch_size --search"),
    "stages": ("llama2_7b_64k", SHORT, "slim/hybrid batch_size Interleaved1F1B"),
    "replicas": ("llama3_8b_128k", SHORT, "--search plain/hybrid groups wlb_lazy/hybrid"),
    "groups": ("llama2_550m_64k", SHORT + WIDE + GROUPS, "--search plain/hybrid wlb_lazy/hybrid"),
}


@pytest.mark.parametrize("name", JOBS)
def test_what_to_try_next_is_not_yet_done_and_runs(name, lengths, monkeypatch):
    file, words, expected = JOBS[name]
    asked = load_job(CONFIGS / f"{file}.toml", words, lengths=str(lengths))
    plain = Scenario(asked.job, asked.documents).predict(Policy(), 2)
    tries = remedies(asked, plain.job, {Policy(): timed(Policy(), plain)})
    commands = [shlex.split(command) for _, command in tries]
    assert all(any(part in " ".join(c) for c in commands) for part in expected.split()), commands
    assert not any(command[-2:] == GROUPS for command in commands if GROUPS[0] in words)
    monkeypatch.setattr("wlb_titan.commands.simulate.SEARCH_SECONDS", 2.0)
    for _, _, file, *typed in commands:
        keys = [word for word in typed if word not in ("--lengths", str(lengths), "--search")]
        assert "--search" in typed or load_job(file, keys, lengths=str(lengths)).job != plain.job
        assert "MFU" in run(file, *typed, "--steps", 1)


TABLE_1 = {
    "550M-64K": "TP 2 x CP 2 x PP 4 x DP 2",
    "550M-128K": "TP 2 x CP 4 x PP 4 x DP 1",
    "7B-64K": "TP 4 x CP 2 x PP 4 x DP 1",
    "7B-128K": "TP 8 x CP 2 x PP 4 x DP 1",
    "30B-64K": "TP 8 x CP 2 x PP 4 x DP 1",
    "30B-128K": "TP 8 x CP 4 x PP 4 x DP 1",
    "70B-64K": "TP 16 x CP 4 x PP 4 x DP 1",
    "70B-128K": "TP 16 x CP 4 x PP 4 x DP 1",
}


@pytest.mark.parametrize("row", TABLE_1)
def test_the_shipped_files_are_the_rows_of_table_1(row):
    size, _, window = row.partition("-")
    job = load_job(CONFIGS / f"llama2_{row.lower().replace('-', '_')}.toml", lengths="web").job
    assert str(job.degrees) == TABLE_1[row]
    assert replace(job.model, projections=None) == PAPER_MODELS[size]
    assert job.window == int(window.removesuffix("K")) * 1024
    assert job.replica_micro_batches == job.degrees.pipeline


def test_the_files_own_policies_are_compared_with_plain(config):
    own = ("--wlb.policy", "wlb_lazy/ulysses")
    said = run(config, "--steps", 1, "--world-size", 4, *own)
    assert re.findall(r"^ +(\w+/\w+)", said, re.M) == ["plain/per_sequence", "wlb_lazy/ulysses"]
    assert "TP 1 x CP 2 x PP 2 x DP 1 = 4 ranks, 1F1B, selective checkpointing" in said
    assert "4 micro-batches a step, context window 8,192" in said


def test_a_policy_that_is_not_possible_is_a_row_with_a_note(config):
    """All but few documents are as long as the window, so that no thresholds let outliers leave."""
    long = ["--training.seq_len", 64, "--steps", 1]
    said = run(config, *long, "--policies", "plain,wlb,wlb_lazy")
    assert re.search(r"^ +wlb/per_sequence +–", said, re.M)
    assert "wlb/per_sequence is not possible here: With queues = 2, outliers would arrive" in said
    assert "With queues = 2, outliers would arrive" in run(config, *long, "--wlb.policy", "wlb", code=2)


def test_policies_are_written_as_they_are_typed():
    """Full class names, too; the default where a part is left out."""
    assert str(Policy.parse("plain")) == "plain/per_sequence"
    lazy, own = "wlb_lazy/hybrid/best", "own_policies.packing:Reversed/hybrid"
    assert (str(Policy.parse(lazy)), str(Policy.parse(own))) == (lazy, own)
    assert Policy.parse(own) == Policy("own_policies.packing:Reversed", "hybrid")


def test_a_published_models_config_is_a_base(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    published = tmp_path / "config.json"
    published.write_text(json.dumps(LLAMA_3_1_8B))
    model = load_config(config, ["--base", "config.json"]).config.model_spec
    assert (model.name, model.flavor) == ("llama3", "8B")
    base = "The nearest base is 'torchtitan.models.llama3.config_registry:llama3_8b': "
    nearest = base + "num_hidden_layers is 30"
    llama2 = {"hidden_size": 4096, "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000}
    published.write_text(json.dumps(LLAMA_3_1_8B | llama2 | {"rope_theta": 1e4, "rope_scaling": None}))
    assert load_config(config, ["--base", "config.json"]).config.model_spec.flavor == "7B"
    texts = {json.dumps(LLAMA_3_1_8B | {"num_hidden_layers": 30}): nearest, "[": "cannot be read"}
    for text, message in texts.items():
        published.write_text(text)
        assert message in run(config, "--base", "config.json", "--lengths", "web", code=2)


def test_predictions_beyond_the_measured_range_say_so(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("262144\n" * 64)
    said = run(*SMALL, "--lengths", path, "--policies", "plain", "--training.seq_len", 262144)
    assert "up to 131,072 keys" in said and "these times are extrapolated" in said
