"""Slices of documents under every parallelism give the losses and gradients of one process without any."""

import json
import math
from collections import Counter, defaultdict

import pytest
from lab import Cases, assert_met, layout, make_corpus


def case(micropacks, sharding=None, *, layers=2, schedule="1F1B", checkpointing=None, steps=(1,), **how):
    """Of `plan_worker.run_case`. `how` has degrees, `compiled`, and settings of the policy."""
    degrees = {name: how.pop(name) for name in (*AXES, "compiled") if name in how}
    sharding = {"name": sharding} if sharding else None
    slim = {"micropacks": micropacks, **how}
    options = {"layers": layers, "schedule": schedule, "checkpointing": checkpointing, "steps": steps}
    return {"slim": slim, "sharding": sharding, **options, **degrees}


AXES = ("pp", "dp", "replicate", "cp", "tp")
INTERLEAVED = {"schedule": "Interleaved1F1B", "pp": 2, "layers": 4}
FULL, SELECTIVE = {"checkpointing": "full"}, {"checkpointing": "selective"}
# The longest document is beyond a data-parallel rank's share of the work.
MERGE = {"micropacks": 6, "dp_merge": True, "cost_model": "quadratic:1,10"}
MERGED = {
    "pp2_dp2_merged": case(**MERGE, pp=2, dp=2, layers=4, **SELECTIVE),
    "pp2_dp2_merged_interleaved": case(**MERGE, **INTERLEAVED, dp=2, **FULL),
    "dp2_merged_compiled": case(**MERGE, dp=2, layers=1, compiled=True),
    "dp4_merged": case(**MERGE, dp=4),
    "dp4_hsdp_merged": case(**MERGE | {"cost_model": "quadratic:1,100"}, dp=2, replicate=2),
    "dp2_cp2_merged": case(**MERGE, dp=2, cp=2, sharding="hybrid", **SELECTIVE),
    "dp2_tp2_merged": case(**MERGE, dp=2, tp=2),
    # The last rank, or the last two, have nobody to share with, but make the others' groups with them.
    "dp3_merged": case(**MERGE, dp=3),
    "dp3_merged_milp": case(**MERGE, solver="milp", time_limit=0.5, dp=3),
    "dp6_merged": case(**MERGE, dp=6, layers=1),
}
CASES = {
    # First: in one process, groups of all earlier cases take their time while it compiles.
    "pp2_dp2_compiled": case(6, pp=2, dp=2, compiled=True),
    "pp4": case(11, pp=4, layers=4, slack=1, steps=[1, 2]),
    "pp2_dp2": case(7, pp=2, dp=2, layers=4, **SELECTIVE),
    "pp2_dp2_interleaved": case(6, **INTERLEAVED, dp=2, **FULL),
    "pp2_tp2": case(8, pp=2, tp=2, **FULL),
    "pp2_cp2_interleaved": case(8, "adaptive", **INTERLEAVED, cp=2, **SELECTIVE),
    "pp2_cp2_ulysses": case(8, "ulysses", pp=2, cp=2),
    "cp2_tp2": case(6, "per_document", cp=2, tp=2),
    "cp4": case(7, "hybrid", cp=4, **FULL),
    "pp4_asymmetric": case(9, pp=4, layers=4, asymmetric=True, **FULL),
    "pp2_dp2_interleaved_asymmetric": case(6, **INTERLEAVED, dp=2, asymmetric=True, **FULL, steps=[1, 2]),
    "pp2_tp2_asymmetric": case(8, pp=2, tp=2, asymmetric=True, **FULL),
    "pp2_cp2_asymmetric": case(8, "adaptive", pp=2, cp=2, asymmetric=True, **FULL),
    "dp4": case(4, dp=4, solver="milp", time_limit=0.5),
    **MERGED,
}


@pytest.fixture(scope="module")
def results(lab, tmp_path_factory, fork_server):
    folder = tmp_path_factory.mktemp("slim")
    outliers = folder / "outliers"
    make_corpus(folder / "outliers.jsonl", outliers, lengths=([125] + [8] * 40) * 10)
    corpora = {name: str(outliers if name in MERGED else lab.corpus) for name in CASES}
    runs = {
        name: {"corpus": corpora[name], "folder": str(folder / name), **case} for name, case in CASES.items()
    }
    by_processes = defaultdict(dict)
    for name, run in runs.items():
        by_processes[math.prod(run.get(axis, 1) for axis in AXES)][name] = run
    results = Cases(fork_server, folder)
    for processes, some in by_processes.items():
        results.run(some, processes)
    return results


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_one_process(results, name):
    records = results[name]
    assert [r["loss"] for r in records] == pytest.approx([r["reference"] for r in records], rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_all_calls_meet(results, name):
    assert_met(results[name][-1]["met"])


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_one_process(results, name):
    for record in results[name]:
        assert record["error"] < 1e-5, record["worst"]


def test_documents_were_sliced(results):
    for name, records in results.items():
        assert all(r["longest_pack"] < 0.9 * r["longest_document"] for r in records), name


def test_documents_were_shared(results):
    groups = {name: {tuple(ranks) for ranks in results[name][0]["merged"]} for name in MERGED}
    assert groups.pop("dp4_merged") == groups.pop("dp6_merged") == {(0, 1, 2, 3)}
    assert set(map(frozenset, groups.values())) == {frozenset({(0, 1)})}


def test_a_run_goes_on_where_its_checkpoint_was_and_its_trace_has_every_pass(lab):
    slim = (
        *("--wlb.packing.policy", "slim", "--wlb.packing.micropacks", "9", *layout(pp=2)),
        *("--parallelism.pipeline_parallel_schedule", "1F1B", "--checkpoint.interval", "2"),
        *("--training.local_batch_size", "1", "--training.global_batch_size", "1"),  # a window on two stages
        *("--training.steps", "4", "--wlb.trace_every", "4"),
    )
    whole = lab.experiment("slim_whole", *slim)
    lab.run(2, [whole])
    step_2 = str(whole.folder / "checkpoint" / "step-2")
    again = lab.experiment(
        *("slim_again", *slim),
        *("--checkpoint.initial_load_path", step_2, "--checkpoint.initial_load_model_only", "false"),
    )
    lab.run(2, [again])
    assert [record["step"] for record in again.metrics()] == [3, 4]
    assert again.losses() == whole.losses()[2:]
    trace = json.loads((again.folder / "traces" / "step-4.json").read_text())["traceEvents"]
    passes = Counter(event["name"] for event in trace if event["ph"] == "X")
    assert passes == {f"{kind}{pack}": 1 if kind == "L" else 2 for kind in "FLB" for pack in range(9)}
    assert 0 < again.metrics()[1]["bubble"] < 1
