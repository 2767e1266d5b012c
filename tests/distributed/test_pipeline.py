"""Pipelines over micro-batches whose lengths and number change at every step equal one process."""

import re
import signal

import pytest
from lab import Cases, assert_met, start_cases

CHANGING = [[64, 128, 256, 72], [200, 16, 32, 128, 64]]
SHORT = [[64, 128, 32, 96]]
FEW = [[64, 128], [128, 64, 256, 16, 80]]
MANY = [[16, 32, 64, 128, 128, 64, 32, 16], [64, 32, 256, 16, 16, 64, 128, 16, 32]]


def case(schedule, layers, steps, pp=2, evaluate=(), **options):
    return {"schedule": schedule, "layers": layers, "steps": steps, "pp": pp, "evaluate": evaluate, **options}


ZERO_BUBBLE = "InterleavedZeroBubble"
CASES = {
    # Four ranks. Where a schedule allows it, the first step has fewer micro-batches than there are ranks.
    "1f1b": case("1F1B", 4, CHANGING, pp=4, evaluate=[1]),
    "gpipe": case("GPipe", 4, FEW, pp=4, evaluate=[0]),
    "interleaved_1f1b": case("Interleaved1F1B", 8, FEW, pp=4, evaluate=[1]),
    "looped_bfs": case("LoopedBFS", 8, FEW, pp=4, evaluate=[0]),
    "interleaved_zero_bubble": case(ZERO_BUBBLE, 8, FEW, pp=4, evaluate=[1]),
    "zbv_zero_bubble": case("ZBVZeroBubble", 8, FEW, pp=4, evaluate=[0, 1]),
    "dual_pipe_v": case("DualPipeV", 8, MANY, pp=4, evaluate=[1]),
    # Two ranks of the pipeline times two of another kind.
    "with_cp": case("1F1B", 2, CHANGING, cp=2, evaluate=[1]),
    "gpipe_with_cp": case("GPipe", 2, SHORT, cp=2),
    "looped_bfs_with_tp": case("LoopedBFS", 4, SHORT, tp=2),
    "interleaved_with_cp": case("Interleaved1F1B", 4, SHORT, cp=2),
    "zero_bubble_with_cp": case(ZERO_BUBBLE, 4, SHORT, cp=2),
    "zbv_with_cp": case("ZBVZeroBubble", 4, SHORT, cp=2, checkpointing="selective"),
    "dual_pipe_v_with_cp": case("DualPipeV", 4, SHORT, cp=2, checkpointing="full"),
    "with_tp_sp": case("Interleaved1F1B", 4, CHANGING[:1], tp=2),
    "with_tp": case("ZBVZeroBubble", 4, CHANGING[1:], tp=2, enable_sequence_parallel=False),
    "with_fsdp": case("1F1B", 2, CHANGING, dp=2, checkpointing="selective", evaluate=[1]),
    "with_replicas": case(ZERO_BUBBLE, 4, FEW[:1], replicate=2, checkpointing="full"),
}
BFLOAT16 = case("1F1B", 2, FEW[:1], dp=2, dtype="bfloat16")


@pytest.fixture(scope="module")
def results(lab, fork_server, drills):  # which mostly wait
    common = {"kind": "case", "corpus": str(lab.corpus)}
    results = Cases(fork_server, lab.folder)
    cases = {name: {**common, **case} for name, case in (CASES | {"bfloat16": BFLOAT16}).items()}
    results.run(cases, program="pipeline_worker")
    return results


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_one_process(results, name):
    records = results[name]
    assert [record["step"] for record in records] == list(range(len(CASES[name]["steps"])))
    for record in records:
        assert record["loss"] == pytest.approx(record["reference"], rel=1e-5), record["step"]
        assert record["error"] < 1e-5, f"{record['worst']} in step {record['step']}"


@pytest.mark.parametrize("name", CASES)
def test_all_calls_meet(results, name):
    assert_met(results[name][-1]["met"])


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]["evaluate"]])
def test_evaluation_equals_one_process(results, name):
    evaluated = {r["step"]: (r["eval"], r["eval_reference"]) for r in results[name] if "eval" in r}
    assert list(evaluated) == CASES[name]["evaluate"]
    for loss, reference in evaluated.values():
        assert loss == pytest.approx(reference, rel=1e-5)


def test_bfloat16_passes_between_stages(results):
    (record,) = results["bfloat16"]
    assert record["loss"] == pytest.approx(record["reference"], rel=1e-3)
    assert 1e-4 < record["error"] < 0.1


TIMEOUT = 20  # seconds, of communication in the drills
TIMED_OUT = re.compile(rf"Timed out waiting {TIMEOUT}000ms")


@pytest.fixture(scope="module")
def drills(lab, fork_server):
    """Two jobs at once, of two ranks each, of which one gets a signal: the job and its log by signal."""
    started = {}
    for number in (signal.SIGKILL, signal.SIGSTOP):
        case = {"kind": "drill", "corpus": str(lab.corpus), "schedule": "1F1B", "layers": 2, "pp": 2}
        cases = {f"drill_{number}": case | {"victim": 1, "signal_number": number, "timeout": TIMEOUT}}
        stem = lab.folder / f"drill_{number}"
        job, log, _ = start_cases(fork_server, stem, cases, 2, "pipeline_worker", together=False)
        started[number] = job, log
    yield started
    for job, _ in started.values():
        job.kill()


def survivor_of(drills, number):
    """What the first rank's log says, which did not end well."""
    job, log = drills[number]
    (code,) = job.wait(200, ranks=[0])
    output = log.read_text()
    assert code != 0, output
    assert "Global rank 0 stopped in a step of 4 micro-batches" in output, output[-4000:]
    return output


def test_a_killed_rank_ends_the_others_with_a_message(drills):
    output = survivor_of(drills, signal.SIGKILL)
    assert not TIMED_OUT.search(output), output[-4000:]
    assert re.search(r"began was [FB][0-3] of stage 0", output), output[-4000:]
    (victim,) = drills[signal.SIGKILL][0].wait(200, ranks=[1])
    assert victim == -signal.SIGKILL


def test_a_stopped_rank_ends_the_others_within_the_timeout(drills):
    output = survivor_of(drills, signal.SIGSTOP)
    assert TIMED_OUT.search(output), output[-4000:]
    assert 1 not in drills[signal.SIGSTOP][0].codes
