"""Slices of documents under every parallelism give the losses and gradients of one process without any."""

import json
import math
from collections import Counter, defaultdict

import pytest
from lab import Cases, assert_met, layout, make_corpus

INTERLEAVED = {"schedule": "Interleaved1F1B", "pp": 2, "layers": 4}
CASES = {
    # First: in one process, groups of all earlier cases take their time while it compiles.
    "pp2_dp2_compiled": {"pp": 2, "dp": 2, "slim": {"micropacks": 6}, "compiled": True},
    "pp4": {"pp": 4, "layers": 4, "slim": {"micropacks": 11, "slack": 1}, "steps": [1, 2]},
    "pp2_dp2": {"pp": 2, "dp": 2, "layers": 4, "slim": {"micropacks": 7}, "checkpointing": "selective"},
    "pp2_dp2_interleaved": {**INTERLEAVED, "dp": 2, "slim": {"micropacks": 6}, "checkpointing": "full"},
    "pp2_tp2": {"pp": 2, "tp": 2, "slim": {"micropacks": 8}, "checkpointing": "full"},
    "pp2_cp2_interleaved": {
        **INTERLEAVED,
        "cp": 2,
        "slim": {"micropacks": 8},
        "sharding": {"name": "adaptive"},
        "checkpointing": "selective",
    },
    "pp2_cp2_ulysses": {"pp": 2, "cp": 2, "slim": {"micropacks": 8}, "sharding": {"name": "ulysses"}},
    "cp2_tp2": {"cp": 2, "tp": 2, "slim": {"micropacks": 6}, "sharding": {"name": "per_document"}},
    "cp4_groups": {
        "cp": 4,
        "slim": {"micropacks": 7},
        "sharding": {"name": "hybrid", "gather_groups": 2},
        "checkpointing": "full",
    },
    "pp4_asymmetric": {
        "pp": 4,
        "layers": 4,
        "slim": {"micropacks": 9, "asymmetric": True},
        "checkpointing": "full",
    },
    "pp2_dp2_interleaved_asymmetric": {
        **INTERLEAVED,
        "dp": 2,
        "slim": {"micropacks": 6, "asymmetric": True},
        "checkpointing": "full",
        "steps": [1, 2],
    },
    "pp2_tp2_asymmetric": {
        "pp": 2,
        "tp": 2,
        "slim": {"micropacks": 8, "asymmetric": True},
        "checkpointing": "full",
    },
    "pp2_cp2_asymmetric": {
        "pp": 2,
        "cp": 2,
        "slim": {"micropacks": 8, "asymmetric": True},
        "sharding": {"name": "adaptive"},
        "checkpointing": "full",
    },
    "dp4": {"dp": 4, "slim": {"micropacks": 4, "solver": "milp", "time_limit": 0.5}},
}
# The longest document is beyond a data-parallel rank's share of the work.
MERGE = {"micropacks": 6, "dp_merge": True, "cost_model": "quadratic:1,10"}
MERGED = {
    "pp2_dp2_merged": {"pp": 2, "dp": 2, "layers": 4, "slim": MERGE, "checkpointing": "selective"},
    "pp2_dp2_merged_interleaved": {**INTERLEAVED, "dp": 2, "slim": MERGE, "checkpointing": "full"},
    "dp2_merged_compiled": {"dp": 2, "layers": 1, "slim": MERGE, "compiled": True},
    "dp4_merged": {"dp": 4, "slim": MERGE},
    "dp4_hsdp_merged": {"dp": 2, "replicate": 2, "slim": {**MERGE, "cost_model": "quadratic:1,100"}},
    "dp2_cp2_merged": {
        "dp": 2,
        "cp": 2,
        "slim": MERGE,
        "sharding": {"name": "hybrid", "gather_groups": 2},
        "checkpointing": "selective",
    },
    "dp2_tp2_merged": {"dp": 2, "tp": 2, "slim": MERGE},
    # The last rank, or the last two, have nobody to share with, but make the others' groups with them.
    "dp3_merged": {"dp": 3, "slim": MERGE},
    "dp3_merged_milp": {"dp": 3, "slim": {**MERGE, "solver": "milp", "time_limit": 0.5}},
    "dp6_merged": {"dp": 6, "layers": 1, "slim": MERGE},
}
CASES |= MERGED


@pytest.fixture(scope="module")
def results(tmp_path_factory, fork_server):
    folder = tmp_path_factory.mktemp("slim")
    make_corpus(folder / "documents.jsonl", folder / "corpus")
    make_corpus(folder / "outliers.jsonl", folder / "outliers", lengths=([125] + [8] * 40) * 10)
    corpora = {name: str(folder / ("outliers" if name in MERGED else "corpus")) for name in CASES}
    runs = {
        name: {"corpus": corpora[name], "folder": str(folder / name), **case} for name, case in CASES.items()
    }
    by_processes = defaultdict(dict)
    for name, run in runs.items():
        by_processes[math.prod(run.get(axis, 1) for axis in ("pp", "dp", "replicate", "cp", "tp"))][name] = (
            run
        )
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
