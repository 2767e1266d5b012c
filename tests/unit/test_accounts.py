"""Accounts of layers by a trace: what they say beside the formulas, when they are known, and what fails."""

from dataclasses import replace

import numpy as np
import pytest

from wlb_titan.cost.models import ModelShape
from wlb_titan.cost.workload import workload
from wlb_titan.layers.passes import JobCost
from wlb_titan.layers.recompute import KINDS
from wlb_titan.memory.layer import TokenBytes
from wlb_titan.memory.rank import Passes
from wlb_titan.runtime import accounts, one_rank
from wlb_titan.runtime.configured import job_of, parallel_dims
from wlb_titan.runtime.models.load import load_config
from wlb_titan.simulator.calibrate import as_predicted, calibrated

pytestmark = pytest.mark.slow

TP, CP, EP = (f"--parallelism.{axis}_parallel_degree" for axis in ("tensor", "context", "expert"))
DP = "--parallelism.data_parallel_shard_degree"
DENSE = "torchtitan.models.llama3.config_registry:llama3_8b"
TRACED = ("qwen3_30b_a3b_32k", "qwen3_30b_a3b_32k_8gpu", "llama3_8b_128k_8gpu_float8")
EXPERTS = "torchtitan.models.qwen3.config_registry:qwen3_moe_debug"


@pytest.fixture
def asked(tmp_path, forked_ranks, monkeypatch):
    """Gives the configuration of a base with overrides, its job on H100s, and what traces its layers."""
    monkeypatch.setattr(accounts, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(accounts, "_found", {})
    file = tmp_path / "job.toml"

    def of(base, *words):
        file.write_text(
            f'base = "{base}"\nwlb = {{ cluster = "h100_roce", corpus.path = "not_here" }}\n'
            'training = { seq_len = 4096, mixed_precision_param = "bfloat16", local_batch_size = 2 }'
        )
        loaded = load_config(file, words)
        return loaded.config, loaded.job, loaded.told

    return of


@pytest.mark.parametrize("words", [(), (TP, "2", CP, "2", "--wlb.policy", "plain/hybrid")])
def test_formulas_of_dense_decoders_say_what_a_trace_tells(asked, words):
    _, job, told = asked(DENSE, *words)
    job = told(replace(job, memory_unknown="nothing"))
    layer, facts = job.account.layers[0], (job.model, job.degrees, job.memory, job.exchange)
    for kind in KINDS:
        by_formula, by_trace = (
            TokenBytes.of(*facts, kind=kind, account=account) for account in (None, job.account)
        )
        assert by_trace.kept == pytest.approx(by_formula.kept, rel=2e-3), kind.name
        assert by_trace.backward == pytest.approx(by_formula.backward, rel=2e-3), kind.name
        assert 0.65 < by_trace.forward / by_formula.forward < 1.001, kind.name  # formulas are generous
    ranks = job.degrees.tensor * job.degrees.context
    model: ModelShape = job.model
    products = 2 * (model.linear_weights - model.hidden * model.vocabulary) / model.layers / ranks
    assert layer.work.forward.products == pytest.approx(products)
    assert layer.work.backward.products == pytest.approx(2 * products)
    assert layer.work.weight_products == pytest.approx(products)


def test_an_account_is_traced_once(asked, tmp_path, monkeypatch):
    """It is kept; a damaged file is as none, and another model has an account of its own."""
    config, job, told = asked(EXPERTS, EP, "2", DP, "2")
    first = told(job)
    assert first.memory_known and not job.memory_known
    (shape,), (file,) = first.accounts, accounts.KEPT.rglob("*.json")
    monkeypatch.setattr(accounts, "_found", {})
    assert job_of(config, parallel_dims(config)).accounts == first.accounts
    other = replace(config, training=replace(config.training, mixed_precision_param="float32"))
    assert accounts.known(other, [shape]) == {}
    monkeypatch.setattr(accounts, "_found", {})
    file.write_text(file.read_text()[:-9])
    assert accounts.known(config, [shape]) == {}

    # Experts of this rank that get twice their share: inputs, both products, gate and product, of bfloat16.
    experts = config.model_spec.model.layers[0].moe.routed_experts.inner_experts
    bytes_ = (
        2 * config.model_spec.model.layers[0].moe.router.top_k * (job.model.hidden + 4 * experts.hidden_dim)
    )
    even, uneven = (first.on(replace(first.cluster, experts=times)) for times in (1.0, 2.0))
    kept = [each.account.layers[0].work.kinds["none"].kept for each in (even, uneven)]
    assert kept[1] - kept[0] == pytest.approx(bytes_, rel=0.01)
    assert uneven.layer_seconds.matrices > 1.2 * even.layer_seconds.matrices
    # A profile of a run with such experts explains by them what would else seem slow products.
    profile = tmp_path / "profile.json"
    calibrated(first, as_predicted(first), "as trained", experts=2.0).save(profile)
    profiled = replace(first, context=replace(first.context, profile=str(profile)))
    assert profiled.measured_cluster.experts == 2.0
    work, same = (workload(JobCost(each), np.ones(1)).sum() for each in (first, profiled))
    assert same == pytest.approx(work, rel=0.1)  # rates of collectives stay those of the cluster
    peaks = [each.fitting.peak(Passes.of([4096] * 2))[0].total for each in (even, uneven)]
    assert peaks[1] > peaks[0]


def test_a_trace_that_fails_is_said_and_nothing_is_predicted(asked, monkeypatch):
    _, job, told = asked(EXPERTS, EP, "2", DP, "2")
    monkeypatch.setattr(one_rank, "PROCESS", "a_program_that_is_not_there")
    with pytest.warns(UserWarning, match="(?s)layers cannot be traced: the process ended .*not predicted"):
        job = told(job)
    assert not job.memory_known and not job.memory_predicted


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.parametrize("policy", ["plain", "wlb_lazy/hybrid/best", "slim/hybrid"])
def test_shipped_files_come_with_their_accounts(asked, name, policy):
    job = load_config(f"train_configs/{name}.toml", ("--wlb.policy", policy)).job
    assert {*job.accounts} == {*accounts.shapes_of(job, [job.policy])} and job.memory_known


def test_products_in_float8_are_repeated_as_others_and_take_their_rate(asked):
    """`selective` repeats wo's and w3's, as of other layers; the head of this model is not in float8."""
    _, untold, told = asked("bases:float8_kernels")
    job = told(untold)
    assert job.memory_known and not untold.memory_known
    plain = replace(job, float8=(0.0, 0.0), memory_unknown="", accounts={})
    work, model = job.account.layers[0].work, job.model
    assert work.forward.products == work.weight_products
    half = 2 * model.hidden * (model.heads * model.head_dim + model.feed_forward)
    repeated = {name: kind.repeated.products for name, kind in work.kinds.items()}
    assert repeated == {"none": 0, "keys": 0, "selective": half, "full": work.forward.products}
    faster = job.cluster.linear_flops_float8 / job.cluster.linear_flops
    assert plain.layer_seconds.matrices == pytest.approx(faster * job.layer_seconds.matrices)
    assert plain.token.matrices == pytest.approx(faster * job.token.matrices)
    assert plain.token.head == job.token.head
    peaks = [each.fitting.peak(Passes.of([4096]))[0].total for each in (job, plain)]
    assert peaks[0] > 1.1 * peaks[1]  # casts in float32 pass by
