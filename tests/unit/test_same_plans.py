"""A TOML file gives the same plans in `plan`, `simulate`, `dryrun` and training, whatever [wlb] sets."""

import json
from dataclasses import MISSING, fields, is_dataclass, replace

import datasets
import numpy as np
import pytest
import torch.distributed as dist
from commands import said
from lab import rows

from wlb_titan.commands import dryrun
from wlb_titan.config.documents import open_corpus, training_documents
from wlb_titan.cost.attention_kernels import Point
from wlb_titan.cost.attention_latency import KernelCost, Tiling
from wlb_titan.cost.cluster import CLUSTERS, load_cluster
from wlb_titan.cost.models import ModelShape
from wlb_titan.cost.profile import Entry, Profile
from wlb_titan.documents import Documents
from wlb_titan.job import Job
from wlb_titan.prepare.prepare import long_tailed_lengths, write_synthetic_corpus
from wlb_titan.runtime.agreement import SharedAnswer, _facts
from wlb_titan.runtime.configured import job_of, model_shape, parallel_dims
from wlb_titan.runtime.dataloader import PlannedDataLoader
from wlb_titan.runtime.models.bases import base_config
from wlb_titan.runtime.models.load import load_config
from wlb_titan.simulator.choice import Scenario, choose

pytestmark = pytest.mark.slow

WORLD_SIZE = 8  # PP 2 x DP 2 x CP 2
WARM_UP, STEPS = 8, 2  # `simulate` leaves out the first ones

FILE = """
base = "llama3_debug"
training = {{ seq_len = 768, local_batch_size = 2, global_batch_size = 8 }}
[parallelism]
pipeline_parallel_degree = 2
context_parallel_degree = 2
data_parallel_shard_degree = 2
[wlb]
device = "cpu"
cluster = "h100_roce"
trace_every = 5
loss_weight = "conversation"
validation = {{ hold_out = 0.05, mask = "none", every = 7 }}
attention = {{ sm_margin = 8, implementation = "reference" }}
context = {{ profile = "{folder}/profile.json"{groups} }}
policy = "{policy}/{sharding}/{order}"
[wlb.corpus]
path = "not used"
tokenizer = "{folder}/a/tokenizer"
column = "not used"
mask = "not used"
seed = 3
[[wlb.corpus.sources]]
path = "{folder}/ids"
name = "first"
weight = 2.5
column = "ids"
mask = "none"
long_length = 300
long_share = 0.4
[[wlb.corpus.sources]]
path = "{folder}/b"
[wlb.packing]
cost_model = "{cost_model}"
{packing}
"""
# What each sets: keys of packing, the sharding, the order.
CASES = {
    "plain": ("", "per_document", "best"),
    "dealt": ("sharers = 2", "per_document", "best"),
    "fixed_greedy": ("global_batches = 3", "adaptive", "best"),
    # A gap that is reached at once: a solver that is stopped by the clock finds something else each time.
    "fixed_solver": ("global_batches = 2\ntime_limit = 20.0\ngap = 0.5", "ulysses", "best"),
    "wlb": ("thresholds = [400, 700]\nqueues = 3\ntolerance = 0.1\nmax_length = 1200", "hybrid", "best"),
    # What each command chooses, too.
    "auto": ("max_length = 1200", "auto", "best"),
    "wlb_lazy": ("tolerance = 0.03\nmax_delay = 5\nmax_length = 1200\nmay_cut = false", "hybrid", "best"),
}
EXCLUDED = {
    *("wlb.epochs", "wlb.validation.path"),  # by the mixture, and by what is held out
    "wlb.stop_after",  # no plan
    *("wlb.bench.policies", "wlb.bench.rounds"),  # in place of training
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two corpora, one as a dataset of others, and a profile of the model's attention in float32."""
    folder = tmp_path_factory.mktemp("plans")
    for seed, name in enumerate("ab"):
        write_synthetic_corpus(folder / name, long_tailed_lengths(200_000, 1500, seed))
    datasets.load_from_disk(folder / "a").rename_column("input_ids", "ids").save_to_disk(folder / "ids")
    config = base_config("llama3_debug")
    model = model_shape(config.model_spec.model)
    assert config.training.mixed_precision_param == "float32"
    heads, points, entries = model.heads // model.kv_heads, (Point(128, 256, 8, 32, 1.5e-3),), []
    for direction, tile in (("forward", 1e-6), ("backward", 2e-6)):
        cost = KernelCost(Tiling(32, 32, 0, 1), 1e-5, 1e-10, 0.0, tile, 2e-6, 3e-7)
        entries.append(Entry(model.head_dim, heads, "float32", direction, cost, points, "reference"))
    Profile("Some device", 1, "torch 2", tuple(entries)).save(folder / "profile.json")
    return folder


@pytest.fixture
def file(folder, tmp_path, request):
    """The case's TOML file, after a look at whether it sets every key."""
    policy = request.param
    case = dict(zip(("packing", "sharding", "order"), CASES[policy], strict=True))
    case["cost_model"] = "quadratic:1,700"
    case["groups"] = "" if case["sharding"] == "ulysses" else ', groups = "auto"'
    (tmp_path / "job.toml").write_text(FILE.format(folder=folder, policy=policy, **case))
    unset = set(defaults(configuration(tmp_path / "job.toml").wlb, "wlb")) - EXCLUDED
    assert not unset, f"keys of which this test says nothing: {unset}"
    return tmp_path / "job.toml"


def defaults(section, path):
    """Keys that have their default in a section and those below it; of a list, in its first element."""
    for field in fields(section):
        value = getattr(section, field.name)
        if isinstance(value, list) and value and is_dataclass(value[0]):
            value = value[0]
        if is_dataclass(value):
            yield from defaults(value, f"{path}.{field.name}")
        elif field.default is not MISSING and value == field.default:
            yield f"{path}.{field.name}"


def configuration(file, words=()):
    return load_config(file, words, WORLD_SIZE).config


def comparable(plan):
    """A plan without the time that it took, as JSON."""
    return {name: value for name, value in plan.items() if name != "plan_ms"}


def of_one_rank(plan, dp_rank):
    """A plan as this rank makes it, which divides no other's micro-batches."""
    for other in plan["micro_batches"]:
        if other["dp_rank"] != dp_rank:
            del other["ranks"], other["sharding"], other["groups"]
            other.pop("recomputed", None)
    return plan


@pytest.fixture
def one_process(tmp_path):
    """The process group that a solver's answer goes through."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("file", rows(CASES, {"auto", "wlb_lazy", "dealt", "fixed_greedy"}), indirect=True)
def test_the_commands_plan_what_training_trains(file, tmp_path, monkeypatch, one_process):
    # `auto` tries every policy, with thresholds found in a sample: here in few steps, on few documents.
    monkeypatch.setattr("wlb_titan.simulator.choice.STEPS", 3)
    monkeypatch.setattr("wlb_titan.documents.mixture.SAMPLE", 1 << 14)
    said("plan", file, "--steps", WARM_UP + STEPS, "--output", tmp_path / "plans.jsonl")
    planned = [comparable(json.loads(line)) for line in (tmp_path / "plans.jsonl").read_text().splitlines()]
    assert all("ranks" in m for plan in planned for m in plan["micro_batches"])

    simulated = []
    original = Scenario.simulate

    def simulate(self, policy, plans):
        simulated.append([comparable(plan.to_json()) for plan in plans])
        return original(self, policy, plans)

    monkeypatch.setattr(Scenario, "simulate", simulate)
    config = configuration(file)
    policy = "/".join((config.wlb.packing.name, config.wlb.context.name, config.wlb.pipeline.name))
    said("simulate", file, "--policies", policy, "--steps", STEPS)
    assert simulated[0] == planned[WARM_UP:]

    dry = []

    def run(asked, kind, ranks, at_once, step, device_bytes):
        config = configuration(file, (*asked.loaded.overrides, "--wlb.policy", str(asked.job.policy)))
        job = job_of(config, parallel_dims(config, WORLD_SIZE))
        assert device_bytes == (job.cluster.memory if job.cluster.kind == "gpu" else None)
        assert not job.undecided
        planner = job.planner(training_documents(config.wlb))
        dry.extend(comparable(planner.next().to_json()) for _ in range(STEPS))
        return []

    monkeypatch.setattr(dryrun, "run_ranks", run)
    said("dryrun", file, "--world-size", WORLD_SIZE)
    assert dry == planned[:STEPS]

    corpus = open_corpus(config.wlb.corpus)
    documents = training_documents(config.wlb, corpus)
    job = replace(job_of(config, parallel_dims(config, WORLD_SIZE)), on_one_rank=SharedAnswer())
    if job.undecided:
        job = choose(job, documents).job
    rank = job.degrees.strides["dp_shard"]  # of the other data-parallel rank
    loader = PlannedDataLoader.Config(corpus=corpus, documents=documents, job=job, rank=rank).build()
    steps = iter(loader)
    trained = [comparable(next(steps).plan.to_json()) for _ in range(STEPS)]
    loader.close()
    assert trained == [of_one_rank(plan, 1) for plan in planned[:STEPS]]


SMALL = ModelShape(layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, feed_forward=96, vocabulary=512)


@pytest.mark.parametrize("what", ["attention", "other work"])
def test_ranks_compare_what_is_in_a_profile_even_without_context_parallelism(tmp_path, what):
    """Packing balances by it: two hosts' files of one name may differ."""
    path = tmp_path / "profile.json"
    record = json.loads((CLUSTERS / "cpu_attention.json").read_text())
    facts = []
    for factor in (1, 2):
        if what == "attention":
            record["units"] = factor
        else:
            record["layer"] = [factor * 0.001, factor * 0.002]
        path.write_text(json.dumps(record))
        cluster = replace(load_cluster("cpu"), attention_profile=str(path))
        job = Job(window=256, micro_batches=1, model=SMALL, cluster=cluster, dtype="float32")
        facts.append(_facts(job, Documents(lengths=np.full(8, 256), fingerprint="one")))
    different = {name for name in facts[0] if facts[0][name] != facts[1][name]}
    assert {what, "work of documents"} <= different and "cluster" not in different
