"""Pipelines over micro-batches whose lengths and number change at every step equal one process."""

import re
import signal

import pytest
from lab import Cases, assert_met, rows

CHANGING = [[64, 128, 256, 72], [200, 16, 32, 128, 64]]
SHORT = [[64, 128, 32, 96]]
FEW = [[64, 128], [128, 64, 256, 16, 80]]
MANY = [[16, 32, 64, 128, 128, 64, 32, 16], [64, 32, 256, 16, 16, 64, 128, 16, 32]]
# name as of `lab.layout` -> lengths of micro-batches of each step, and steps before which is evaluated; on
# four ranks of the pipeline, or on two times two of another kind. Where a schedule allows it, the first step
# has fewer micro-batches than there are ranks.
CASES = {
    "pp4 layers4 1F1B": (CHANGING, [1]),
    "pp4 layers8 Interleaved1F1B": (FEW, [1]),
    "pp4 layers8 ZBVZeroBubble": (FEW, [0, 1]),
    "pp2 cp2 1F1B": (CHANGING, [1]),
    "pp2 tp2 layers4 LoopedBFS": (SHORT, []),
    "pp2 cp2 layers4 DualPipeV full": (SHORT, []),
    "pp2 tp2 layers4 Interleaved1F1B": (CHANGING[:1], []),
    "pp2 dp2 layers4 ZBVZeroBubble always": (FEW, [1]),
    "pp2 dp2 1F1B selective": (CHANGING, [1]),
    "pp2 replicas2 layers4 InterleavedZeroBubble full": (FEW[:1], []),
}
LONG = {
    "pp4 layers4 GPipe": (FEW, [0]),
    "pp4 layers8 LoopedBFS": (FEW, [0]),
    "pp4 layers8 InterleavedZeroBubble": (FEW, [1]),
    "pp4 layers8 DualPipeV": (MANY, [1]),
    "pp2 cp2 GPipe": (SHORT, []),
    "pp2 cp2 layers4 Interleaved1F1B": (SHORT, []),
    "pp2 cp2 layers4 InterleavedZeroBubble": (SHORT, []),
    "pp2 cp2 layers4 ZBVZeroBubble selective": (SHORT, []),
    "pp2 tp2 layers4 ZBVZeroBubble whole_states": (CHANGING[1:], []),
    "pp2 layers4 InterleavedZeroBubble always": (FEW[:1], []),
    "pp2 tp2 layers4 DualPipeV always": (SHORT, []),
}
ALL = CASES | LONG
EVALUATED = [name for name, (_, evaluate) in ALL.items() if evaluate]
BFLOAT16 = "pp2 dp2 1F1B bfloat16"
TIMEOUT = 20  # seconds, of communication in the drills
TIMED_OUT = re.compile(rf"Timed out waiting {TIMEOUT}000ms")


def comm(seconds):
    return ["--comm.init_timeout_seconds", str(seconds), "--comm.train_timeout_seconds", str(seconds)]


@pytest.fixture(scope="module")
def cases(lab, fork_server):
    return Cases(fork_server, lab.folder, lab.corpus)


@pytest.fixture(scope="module")
def results(cases, drills):  # which mostly wait
    arguments = {}
    for name, (steps, evaluate) in {**ALL, BFLOAT16: (FEW[:1], [])}.items():
        words = ["--training.local_batch_size", str(len(steps[0]))]
        arguments[name] = {"words": words, "steps": steps, "evaluate": evaluate}
    cases.add("pipeline", arguments, ("--loss.num_chunks", "2", *comm(60)), LONG)
    return cases


@pytest.mark.parametrize("name", rows(ALL, LONG))
def test_losses_and_gradients_equal_one_process(results, name):
    records = results[name]
    assert len(records) == len(ALL[name][0])
    for record in records:
        assert record["loss"] == pytest.approx(record["reference"], rel=1e-5), record["step"]
        assert record["error"] < 1e-5, f"{record['worst']} in step {record['step']}"
    assert_met(records[-1]["met"])


@pytest.mark.parametrize("name", rows(EVALUATED, LONG))
def test_evaluation_equals_one_process(results, name):
    evaluated = {r["step"]: (r["eval"], r["eval_reference"]) for r in results[name] if "eval" in r}
    assert list(evaluated) == ALL[name][1]
    for loss, reference in evaluated.values():
        assert loss == pytest.approx(reference, rel=1e-5)


def test_bfloat16_passes_between_stages(results):
    (record,) = results[BFLOAT16]
    assert record["loss"] == pytest.approx(record["reference"], rel=1e-3)
    assert 1e-4 < record["error"] < 0.1


@pytest.fixture(scope="module")
def drills(cases):
    """Two jobs at once, of two ranks each, of which one gets a signal: the job and its log by signal."""
    started = {}
    for number in (signal.SIGKILL, signal.SIGSTOP):
        name = f"drill {number}"
        words = cases.words(name, "pp2 1F1B", comm(TIMEOUT))
        case = {"kind": "drill", "words": words, "signal_number": number}
        job, log, _ = cases.start(name, {name: case}, 2, together=False)
        started[number] = job, log
    yield started
    for job, _ in started.values():
        job.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_rank_ends_the_others_with_a_message(drills, number):
    """The killed one's at once, the stopped one's within the timeout."""
    (job, log), killed = drills[number], number == signal.SIGKILL
    (code,) = job.wait(200, ranks=[0])
    output = log.read_text()
    stopped = r"Global rank 0 stopped in a step of 4 micro-batches; .* began was [FB][0-3] of stage 0"
    assert code != 0 and re.search(stopped, output), output[-4000:]
    assert bool(TIMED_OUT.search(output)) != killed, output[-4000:]
    assert job.wait(200, ranks=[1]) == [-signal.SIGKILL] if killed else 1 not in job.codes
