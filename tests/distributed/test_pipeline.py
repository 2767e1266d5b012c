"""Pipelines over micro-batches whose lengths and number change at every step equal one process."""

import re
import signal

import pytest
from lab import Cases, assert_met, make_corpus, start_cases

CHANGING = [[64, 128, 256, 72], [200, 16, 32, 128, 64]]
SHORT = [[64, 128, 32, 96]]
FEW = [[64, 128], [128, 64, 256, 16, 80]]
MANY = [[16, 32, 64, 128, 128, 64, 32, 16], [64, 32, 256, 16, 16, 64, 128, 16, 32]]

CASES = {
    # Four ranks. Where a schedule allows it, the first step has fewer micro-batches than there are ranks.
    "1f1b": {"schedule": "1F1B", "layers": 4, "pp": 4, "steps": CHANGING, "evaluate": [1]},
    "gpipe": {"schedule": "GPipe", "layers": 4, "pp": 4, "steps": FEW, "evaluate": [0]},
    "interleaved_1f1b": {"schedule": "Interleaved1F1B", "layers": 8, "pp": 4, "steps": FEW, "evaluate": [1]},
    "looped_bfs": {"schedule": "LoopedBFS", "layers": 8, "pp": 4, "steps": FEW, "evaluate": [0]},
    "interleaved_zero_bubble": {
        "schedule": "InterleavedZeroBubble",
        "layers": 8,
        "pp": 4,
        "steps": FEW,
        "evaluate": [1],
    },
    "zbv_zero_bubble": {"schedule": "ZBVZeroBubble", "layers": 8, "pp": 4, "steps": FEW, "evaluate": [0, 1]},
    "dual_pipe_v": {"schedule": "DualPipeV", "layers": 8, "pp": 4, "steps": MANY, "evaluate": [1]},
    # Two ranks of the pipeline times two of another kind.
    "with_cp": {"schedule": "1F1B", "layers": 2, "pp": 2, "cp": 2, "steps": CHANGING, "evaluate": [1]},
    "gpipe_with_cp": {"schedule": "GPipe", "layers": 2, "pp": 2, "cp": 2, "steps": SHORT},
    "looped_bfs_with_tp": {"schedule": "LoopedBFS", "layers": 4, "pp": 2, "tp": 2, "steps": SHORT},
    "interleaved_with_cp": {"schedule": "Interleaved1F1B", "layers": 4, "pp": 2, "cp": 2, "steps": SHORT},
    "zero_bubble_with_cp": {
        "schedule": "InterleavedZeroBubble",
        "layers": 4,
        "pp": 2,
        "cp": 2,
        "steps": SHORT,
    },
    "zbv_with_cp": {
        "schedule": "ZBVZeroBubble",
        "layers": 4,
        "pp": 2,
        "cp": 2,
        "steps": SHORT,
        "checkpointing": "selective",
    },
    "dual_pipe_v_with_cp": {
        "schedule": "DualPipeV",
        "layers": 4,
        "pp": 2,
        "cp": 2,
        "steps": SHORT,
        "checkpointing": "full",
    },
    "with_tp_sp": {"schedule": "Interleaved1F1B", "layers": 4, "pp": 2, "tp": 2, "steps": CHANGING[:1]},
    "with_tp": {
        "schedule": "ZBVZeroBubble",
        "layers": 4,
        "pp": 2,
        "tp": 2,
        "steps": CHANGING[1:],
        "enable_sequence_parallel": False,
    },
    "with_fsdp": {
        "schedule": "1F1B",
        "layers": 2,
        "pp": 2,
        "dp": 2,
        "steps": CHANGING,
        "checkpointing": "selective",
        "evaluate": [1],
    },
    "with_replicas": {
        "schedule": "InterleavedZeroBubble",
        "layers": 4,
        "pp": 2,
        "replicate": 2,
        "steps": FEW[:1],
        "checkpointing": "full",
    },
}
BFLOAT16 = {"schedule": "1F1B", "layers": 2, "pp": 2, "dp": 2, "steps": FEW[:1], "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    make_corpus(folder / "documents.jsonl", folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def results(folder, fork_server, drills):  # which mostly wait
    common = {"kind": "case", "corpus": str(folder / "corpus")}
    results = Cases(fork_server, folder)
    cases = {name: {**common, **case} for name, case in (CASES | {"bfloat16": BFLOAT16}).items()}
    results.run(cases, program="pipeline_worker")
    return results


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_one_process(results, name):
    records = results[name]
    assert len(records) == len(CASES[name]["steps"])
    assert [r["loss"] for r in records] == pytest.approx([r["reference"] for r in records], rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_all_calls_meet(results, name):
    assert_met(results[name][-1]["met"])


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_one_process(results, name):
    for record in results[name]:
        assert record["error"] < 1e-5, f"{record['worst']} in step {record['step']}"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "evaluate" in case])
def test_evaluation_equals_one_process(results, name):
    evaluated = [r for r in results[name] if "eval" in r]
    assert [r["step"] for r in evaluated] == CASES[name]["evaluate"]
    assert [r["eval"] for r in evaluated] == pytest.approx([r["eval_reference"] for r in evaluated], rel=1e-5)


def test_bfloat16_passes_between_stages(results):
    (record,) = results["bfloat16"]
    assert record["loss"] == pytest.approx(record["reference"], rel=1e-3)
    assert 1e-4 < record["error"] < 0.1


TIMEOUT = 20  # seconds, of communication in the drills
TIMED_OUT = re.compile(rf"Timed out waiting {TIMEOUT}000ms")


@pytest.fixture(scope="module")
def drills(folder, fork_server):
    """Two jobs at once, of two ranks each, of which one gets a signal: the job and its log by signal."""
    started = {}
    for number in (signal.SIGKILL, signal.SIGSTOP):
        case = {"kind": "drill", "corpus": str(folder / "corpus"), "schedule": "1F1B", "layers": 2, "pp": 2}
        cases = {f"drill_{number}": case | {"victim": 1, "signal_number": number, "timeout": TIMEOUT}}
        stem = folder / f"drill_{number}"
        job, log, _ = start_cases(fork_server, stem, cases, 2, "pipeline_worker", together=False)
        started[number] = job, log
    yield started
    for job, _ in started.values():
        job.kill()


def test_a_killed_rank_ends_the_others_with_a_message(drills):
    job, log = drills[signal.SIGKILL]
    survivor, victim = job.wait(200)
    output = log.read_text()
    assert survivor != 0, output
    assert victim == -signal.SIGKILL
    assert not TIMED_OUT.search(output), output[-4000:]
    assert "Global rank 0 stopped in a step of 4 micro-batches" in output, output[-4000:]
    assert re.search(r"began was [FB][0-3] of stage 0", output), output[-4000:]


def test_a_stopped_rank_ends_the_others_within_the_timeout(drills):
    job, log = drills[signal.SIGSTOP]
    (survivor,) = job.wait(200, ranks=[0])
    output = log.read_text()
    assert survivor != 0, output
    assert 1 not in job.codes
    assert TIMED_OUT.search(output), output[-4000:]
    assert "Global rank 0 stopped in a step of 4 micro-batches" in output, output[-4000:]
