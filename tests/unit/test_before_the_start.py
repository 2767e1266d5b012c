"""What is settled before a first step: a model's shape, whether it fits, how long ranks wait, which GPUs."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torchtitan.distributed import ParallelDims

from wlb_titan.cost.cluster import CLUSTERS, load_cluster
from wlb_titan.cost.models import rank_parameters
from wlb_titan.cost.profile import configured_latency
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError, UserError
from wlb_titan.job import Job
from wlb_titan.layers.passes import Loads, pass_times
from wlb_titan.memory.fits import USABLE, USABLE_IN_SLICES
from wlb_titan.memory.rank import Passes
from wlb_titan.packing import POLICIES
from wlb_titan.runtime import agreement
from wlb_titan.runtime.configured import job_of, model_shape
from wlb_titan.runtime.memory import check_memory
from wlb_titan.runtime.models.bases import base_config
from wlb_titan.runtime.models.load import load_config
from wlb_titan.runtime.one_rank.dry_run import Float32Linear
from wlb_titan.simulator.measured import without_waiting

pytestmark = pytest.mark.slow

GIB = 2**30


def job_on(ranks, config):
    return job_of(config, ParallelDims.from_config(config.parallelism, ranks))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The job of a TOML file on four ranks."""

    def load(text):
        path = tmp_path_factory.mktemp("memory") / "train.toml"
        path.write_text(text)
        return job_on(4, load_config(path).config)

    return load


PIPELINE = """
base = "llama2_7b"
training = { seq_len = 32768, local_batch_size = 8 }
parallelism = { pipeline_parallel_degree = 4, data_parallel_shard_degree = 1 }
[wlb]
cluster = "h100_roce"
policy = "wlb"
"""


def test_what_cannot_fit_is_refused_with_the_arithmetic(loaded):
    job = loaded(PIPELINE)
    ranks = job.fitting.least.peak(Passes.of([job.window] * 8))
    most = max(ranks, key=lambda rank: rank.total)
    assert [rank.layers for rank in ranks] == [8, 9, 8, 7]
    enough = most.total / USABLE + 1
    check_memory(job, enough)
    with pytest.raises(UserError) as error:
        check_memory(job, enough - GIB // 10)
    message = str(error.value)
    # What is refused, and where L_max is no longer than a window, is one limit.
    for memory, refused in ((enough, False), (enough - GIB // 10, True)):
        tight = job.on(replace(job.cluster, memory=memory))
        assert tight.fitting.windows_fit != refused
        assert job.window <= tight.longest_micro_batch < 1.1 * job.window
    assert f"pipeline rank {most.rank}: {most.total / GIB:.2f} GiB" in message
    assert "activations" in message and "optimizer" in message and "\n" not in message


def test_the_default_of_max_length_is_what_is_predicted_to_fit(loaded):
    def bounded(share, text=PIPELINE):
        job = loaded(text)
        return job.on(replace(job.cluster, kind="gpu", memory=share * enough)).longest_micro_batch

    job = loaded(PIPELINE)
    window = job.window
    enough = max(rank.total for rank in job.fitting.peak(Passes.of([2 * window] * 8))) / USABLE + GIB
    assert window < bounded(0.8) < bounded(1) == bounded(4) == 2 * window
    assert bounded(0.1) == window  # which training refuses
    assert bounded(0.8, PIPELINE + f"packing.max_length = {window + 4096}\n") == window + 4096
    # Without a device but the CPU there is nothing to fill, but where its memory is said.
    on_cpu = PIPELINE.replace("h100_roce", "cpu")
    assert loaded(on_cpu).longest_micro_batch == 2 * window
    assert bounded(0.1, on_cpu) == window


SLIM = PIPELINE.replace('"wlb"', '"slim"')


def test_memory_bounds_the_tokens_in_flight(loaded):
    assert loaded(SLIM + "packing.tokens_in_flight = 40000").packing.tokens_in_flight == 40000
    job = loaded(SLIM)
    device = max(rank.total for rank in job.fitting.least.document(8 * 32768)) * 0.8
    job = job.on(replace(job.cluster, memory=device))
    assert 32768 <= job.fitting.most_in_flight < 8 * 32768

    def fits(tokens):
        return max(rank.total for rank in job.fitting.least.document(tokens)) <= USABLE_IN_SLICES * device

    assert fits(job.fitting.most_in_flight) and not fits(job.fitting.most_in_flight + 64)


def test_a_window_is_enough_for_four_stages(loaded):
    one = SLIM.replace("local_batch_size = 8", "local_batch_size = 1")
    assert loaded(one).replica_micro_batches == 1
    for refused in (one.replace("slim", "plain"), one + "[wlb.validation]\nhold_out = 0.1"):
        with pytest.raises(UserError, match="as many micro-batches as stages, but there are 1 for 4"):
            loaded(refused)


def test_a_document_that_fits_in_no_order_is_refused(loaded):
    job = loaded(SLIM)
    job = job.on(replace(job.cluster, memory=30 * GIB))
    with pytest.raises(PlanError, match="with a document of 32,768 tokens") as error:
        job.planner(Documents(lengths=np.full(100, 32768)))
    assert error.value.setting == "training.seq_len"
    with pytest.raises(UserError, match="with a document of 32,768 tokens the prediction is"):
        check_memory(job, 30 * GIB)


def test_packs_of_their_own_for_backward_passes_take_the_place_of_full_checkpointing(loaded):
    full = '\n[activation_checkpoint]\nclass = "FullAC"'
    assert loaded(SLIM + "packing.asymmetric = true" + full).packing.regroups
    assert not loaded(SLIM + full).packing.regroups


def test_a_changed_copy_of_the_cpus_file_is_a_cpu_too(loaded, tmp_path):
    written = (CLUSTERS / "cpu.toml").read_text().replace("68e9", "70e9").replace("attention_profile", "# ")
    (tmp_path / "mine.toml").write_text(written)
    job = loaded(PIPELINE.replace("h100_roce", str(tmp_path / "mine.toml")))
    assert (job.cluster.linear_flops, job.overlap) == (70e9, False)
    assert job.longest_micro_batch == 2 * job.window and not job.mixes
    for cluster in (job.cluster, without_waiting(job.cluster)):
        source = configured_latency(cluster, job.attention_shape).source
        assert source.endswith("scaled to CPU, one thread a process")  # by no factor of a kernel


QWEN3 = "torchtitan.models.qwen3.config_registry:qwen3_"
LOOPED = PIPELINE.replace("parallelism = {", 'parallelism = { pipeline_parallel_schedule = "LoopedBFS",')


@pytest.mark.parametrize("text", [LOOPED, f'base = "{QWEN3}moe_debug"'], ids=["schedule", "experts"])
def test_what_is_not_known_is_not_refused(loaded, text):
    check_memory(loaded(text), 1)


@pytest.mark.parametrize(("experts", "length"), [(1, 131), (2, 132)])
def test_experts_in_parallel_divide_tokens_over_tensor_parallel_ranks(loaded, experts, length):
    degrees = f"tensor_parallel_degree = 2, expert_parallel_degree = {experts}"
    parallelism = f"parallelism = {{ {degrees}, enable_sequence_parallel = false }}"
    assert loaded(f'base = "{QWEN3}moe_debug"\nloss.num_chunks = 1\n{parallelism}').padded(131) == length


@pytest.mark.parametrize("base", ["llama3_debug", QWEN3 + "moe_debug", QWEN3 + "0_6b"])
def test_the_weights_are_those_of_the_model(base):
    model = base_config(base).model_spec.model
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in model.build().parameters())
    shape = model_shape(model)
    # Not counted: routers, and norms of queries and keys.
    assert rank_parameters(shape, [shape.layers], [0]) == pytest.approx(weights, rel=5e-3)


def test_a_gpu_that_no_cluster_knows_counts_with_its_own_memory(loaded, monkeypatch):
    gpu = "NVIDIA RTX A6000", 48 * GIB
    monkeypatch.setattr("wlb_titan.runtime.configured.gpu_at_hand", lambda device: gpu)
    own, named = loaded(PIPELINE.replace('cluster = "h100_roce"', "")), loaded(PIPELINE)
    assert (own.cluster.memory, named.cluster.memory) == (48 * GIB, load_cluster("h100_roce").memory)
    assert own.overlap and "RTX A6000" in own.cluster.name


def timeout(config):
    config.wlb.cluster = "h100_roce"
    return agreement.timeout(config, job_on(1, config))


@pytest.fixture
def config():
    return deepcopy(base_config("llama2_7b"))


def test_a_long_step_is_waited_for_and_longer_micro_batches_for_longer(config):
    assert timeout(base_config("llama3_debug")) == 300  # a small job keeps the default
    config.training = replace(config.training, seq_len=2**20, local_batch_size=16)
    seconds = timeout(config)
    assert seconds > 300
    config.wlb.packing = POLICIES.configure("wlb", max_length=3 * config.training.seq_len)
    assert timeout(config) == pytest.approx(3 * seconds, rel=0.01)


def test_compiling_and_solving_are_added_but_not_to_the_user_s_bound(config):
    plain = timeout(config)
    config.compile.enable = True
    compiled = timeout(config)
    config.wlb.packing = POLICIES.configure("fixed_solver", time_limit=30.0)
    assert compiled - plain >= 300 and timeout(config) - compiled == 30
    config.comm.train_timeout_seconds = 7
    assert timeout(config) == 7


H100, MIG = "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"


@pytest.mark.parametrize(
    ("gpus", "memory", "words"),
    [
        ([(H100, 79)] * 2, 79, []),
        ([(H100, 79), (MIG, 40)], 40, ["MIG", "40.0 GiB"]),
        ([(H100, 79), ("NVIDIA H200", 139)], 79, ["HBM3 and NVIDIA H200:", "is H100", "[wlb] cluster"]),
        ([("NVIDIA GH200 480GB", 95), ("NVIDIA GH200 480GB", 94)], 94, ["GH200", "[wlb] cluster"]),
    ],
    ids=["same", "part", "other", "unknown"],
)
def test_different_gpus_are_planned_for_as_rank_0_s_with_the_least_memory(gpus, memory, words):
    cluster, warning = agreement.common_cluster([(name, gib * 2**30) for name, gib in gpus])
    assert cluster.memory == memory * 2**30 and (gpus[0][0] != H100 or cluster.gpus_per_node == 8)
    assert bool(warning) == bool(words) and all(word in warning for word in words)


# Parameters that one token visits, as published, less the embedding's where it is among them; and facts.
MODELS = {
    "llama3.config_registry:llama3_8b": (
        8.03e9 - 128256 * 4096,
        {"experts": 0, "visits": 0.0, "routed_width": 0, "expert_weights": 0},
    ),
    "qwen3.config_registry:qwen3_30b_a3b": (
        3.35e9 - 151936 * 2048,
        {"experts": 128, "visits": 8, "routed_width": 8 * 768, "expert_weights": 128 * 3 * 2048 * 768},
    ),
    "gpt_oss.config_registry:gpt_oss_20b": (
        3.61e9,
        {"layers": 24, "windows": (128, None) * 12, "v_head_dim": None},
    ),
    "deepseek_v3.config_registry:deepseek_v3_671b": (
        37.5e9 - 129280 * 7168,
        {"head_dim": 192, "v_head_dim": 128, "heads": 128, "kv_heads": 128, "experts": 256}
        | {"visits": 8 * 58 / 61},  # three layers are dense
    ),
    "muse_glimmer.config_registry:muse_glimmer_30b": (None, {"windows": (2048, 2048, 2048, None) * 13}),
}


@pytest.mark.parametrize("base", MODELS)
def test_weights_heads_windows_and_experts_are_those_of_the_published_models(base):
    shape = model_shape(base_config(f"torchtitan.models.{base}").model_spec.model)
    weights, facts = MODELS[base]
    assert weights is None or shape.linear_weights == pytest.approx(weights, rel=0.02)
    assert {name: getattr(shape, name) for name in facts} == facts


def test_frozen_weights_have_no_gradients():
    """LoRA's forward pass and its gradients of inputs are the model's."""
    whole, frozen = (model_shape(base_config(f"bases:{name}").model_spec.model) for name in ("llama", "lora"))
    assert frozen == replace(whole, frozen=True)
    assert whole.flops([100]) - frozen.flops([100]) == pytest.approx(2 * whole.linear_weights * 100)
    tokens, nothing = np.ones((1, 1)), np.zeros((1, 1))
    micro_batch = Loads(tokens, *[nothing] * 5)
    passes = [pass_times(Job(window=64, micro_batches=1, model=m), micro_batch) for m in (whole, frozen)]
    assert passes[0].forward == passes[1].forward and passes[1].weights == 0 < passes[0].weights


def test_a_dry_run_s_router_computes_in_float32():
    """As under CUDA's autocast, of which that of CPUs warns that it does nothing."""
    gate = Float32Linear.Config(in_features=8, out_features=4).build().bfloat16()
    hidden = torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)
    scores = gate(hidden)
    assert scores.dtype == torch.float32
    scores.sum().backward()
    assert hidden.grad.dtype == gate.weight.grad.dtype == torch.bfloat16
