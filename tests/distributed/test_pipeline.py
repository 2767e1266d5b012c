"""Pipelines over micro-batches whose lengths and number change at every step equal one process."""

import re
import signal

import pytest
from lab import Cases, assert_met
from rows import rows

CHANGING = [[64, 128, 256, 72], [200, 16, 32, 128, 64]]
SHORT = [[64, 128, 32, 96]]
FEW = [[64, 128], [128, 64, 256, 16, 80]]
MANY = [[16, 32, 64, 128, 128, 64, 32, 16], [64, 32, 256, 16, 16, 64, 128, 16, 32]]
# name as of `lab.layout` -> lengths of the micro-batches of each step, and steps before which is evaluated
CASES = {
    # Four ranks. Where a schedule allows it, the first step has fewer micro-batches than there are ranks.
    "pp4 layers4 1F1B": (CHANGING, [1]),
    "pp4 layers4 GPipe": (FEW, [0]),
    "pp4 layers8 Interleaved1F1B": (FEW, [1]),
    "pp4 layers8 LoopedBFS": (FEW, [0]),
    "pp4 layers8 InterleavedZeroBubble": (FEW, [1]),
    "pp4 layers8 ZBVZeroBubble": (FEW, [0, 1]),
    "pp4 layers8 DualPipeV": (MANY, [1]),
    # Two ranks of the pipeline times two of another kind.
    "pp2 cp2 1F1B": (CHANGING, [1]),
    "pp2 cp2 GPipe": (SHORT, []),
    "pp2 tp2 layers4 LoopedBFS": (SHORT, []),
    "pp2 cp2 layers4 Interleaved1F1B": (SHORT, []),
    "pp2 cp2 layers4 InterleavedZeroBubble": (SHORT, []),
    "pp2 cp2 layers4 ZBVZeroBubble selective": (SHORT, []),
    "pp2 cp2 layers4 DualPipeV full": (SHORT, []),
    "pp2 tp2 layers4 Interleaved1F1B": (CHANGING[:1], []),
    "pp2 tp2 layers4 ZBVZeroBubble whole_states": (CHANGING[1:], []),
    "pp2 dp2 layers4 ZBVZeroBubble always": (FEW, [1]),
    "pp2 layers4 InterleavedZeroBubble always": (FEW[:1], []),
    "pp2 tp2 layers4 DualPipeV always": ([[64, 128, 32, 96]], []),
    "pp2 dp2 1F1B selective": (CHANGING, [1]),
    "pp2 replicas2 layers4 InterleavedZeroBubble full": (FEW[:1], []),
}
LONG = {
    *(
        "pp4 layers4 GPipe",
        "pp4 layers8 LoopedBFS",
        "pp4 layers8 InterleavedZeroBubble",
        "pp4 layers8 DualPipeV",
    ),
    *("pp2 cp2 GPipe", "pp2 cp2 layers4 Interleaved1F1B", "pp2 cp2 layers4 InterleavedZeroBubble"),
    *("pp2 cp2 layers4 ZBVZeroBubble selective", "pp2 tp2 layers4 ZBVZeroBubble whole_states"),
    *("pp2 layers4 InterleavedZeroBubble always", "pp2 tp2 layers4 DualPipeV always"),
}
EVALUATED = [name for name, (_, evaluate) in CASES.items() if evaluate]
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
    for name, (steps, evaluate) in {**CASES, BFLOAT16: (FEW[:1], [])}.items():
        words = ["--training.local_batch_size", str(len(steps[0]))]
        arguments[name] = {"words": words, "steps": steps, "evaluate": evaluate}
    cases.add("pipeline", arguments, ("--loss.num_chunks", "2", *comm(60)), LONG)
    return cases


@pytest.mark.parametrize("name", rows(CASES, LONG))
def test_losses_and_gradients_equal_one_process(results, name):
    records = results[name]
    assert len(records) == len(CASES[name][0])
    for record in records:
        assert record["loss"] == pytest.approx(record["reference"], rel=1e-5), record["step"]
        assert record["error"] < 1e-5, f"{record['worst']} in step {record['step']}"
    assert_met(records[-1]["met"])


@pytest.mark.parametrize("name", rows(EVALUATED, LONG))
def test_evaluation_equals_one_process(results, name):
    evaluated = {r["step"]: (r["eval"], r["eval_reference"]) for r in results[name] if "eval" in r}
    assert list(evaluated) == CASES[name][1]
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
