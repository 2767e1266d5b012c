"""What came of a trial is recorded and found again; its process may pass, refuse, die, hang or not begin."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from wlb_titan.kernels import record
from wlb_titan.kernels.implementations import chosen, device_of

DIMS, BF16 = (128, 128), torch.bfloat16
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def hopper(monkeypatch, tmp_path):
    """A GPU of that name and driver, and an empty cache folder."""
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\nGCC version: 12")
    monkeypatch.setattr(record, "DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    device_of.cache_clear()
    yield
    device_of.cache_clear()


def ended(code: str, seconds: float = 60.0) -> record.Verdict:
    """A trial of this Python program, to its end."""
    trial = record.Trial(record.subject(CUDA, DIMS, BF16), [sys.executable, "-c", code], seconds)
    while (found := trial.verdict(5.0)) is None:
        pass
    return found


def backward() -> str:
    device_of.cache_clear()
    return chosen("backward", "auto", DIMS, BF16, device_of(CUDA))


def test_auto_takes_gluons_backward_only_after_it_has_passed():
    of = record.subject(CUDA, DIMS, BF16)
    assert (of.gpu, of.driver, of.dtype) == ("NVIDIA H100", "550.54.15", "bfloat16")
    assert chosen("forward", "auto", DIMS, BF16, device_of(CUDA)) == "gluon"
    assert backward() == "triton" and record.verdict(of) is None
    assert ended("print('all right')") == record.Verdict(True)
    assert backward() == "gluon"
    assert chosen("backward", "auto", DIMS, torch.float16, device_of(CUDA)) == "triton"
    assert record.trial(of, CUDA) is None, "what is recorded is not tried again"


@pytest.mark.parametrize(
    "change",
    [{"gpu": "NVIDIA H200"}, {"driver": "560.1"}, {"triton": "9.9"}, {"kernels": "0"}, {"dtype": "float16"}],
    ids=lambda change: next(iter(change)),
)
def test_a_record_speaks_of_nothing_else(change):
    of = record.subject(CUDA, DIMS, BF16)
    record.write(of, record.Verdict(True))
    assert record.verdict(of) == record.Verdict(True)
    assert record.verdict(of._replace(**change)) is None


def test_kernels_are_known_by_their_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "__file__", str(tmp_path / "record.py"))
    found = []
    for text in ("a = 1", "a = 2"):
        (tmp_path / "kernel.py").write_text(text)
        record.sources.cache_clear()
        found.append(record.sources())
    record.sources.cache_clear()
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('dq is 0.3 of its norm wrong'); raise SystemExit(1)", "dq is 0.3 of its norm wrong"),
        (
            "import os; print('beginning', flush=True); os.kill(os.getpid(), 11)",
            "ended by signal 11, after: beginning",
        ),
        ("raise SystemExit(3)", "no word"),
    ],
    ids=["wrong", "dies", "silent"],
)
def test_a_refusal_is_recorded_and_not_tried_again(code, reason):
    assert ended(code) == record.Verdict(False, reason)
    of = record.subject(CUDA, DIMS, BF16)
    assert record.verdict(of) == record.Verdict(False, reason)
    assert backward() == "triton" and record.trial(of, CUDA) is None


def test_a_trial_that_hangs_is_killed_and_recorded(tmp_path):
    """Though it does not listen; and who waits is told now and then that it still runs."""
    number = tmp_path / "number"
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(number)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    of = record.subject(CUDA, DIMS, BF16)
    trial = record.Trial(of, [sys.executable, "-c", code], seconds=600)
    assert trial.verdict(0.01) is None
    while not (number.exists() and number.read_text()):
        time.sleep(0.01)
    trial.end = time.monotonic()
    assert trial.verdict(60.0) == record.Verdict(False, "not ended after 600 s") == record.verdict(of)
    assert trial._process.wait(60) == -9
    assert not Path(f"/proc/{number.read_text()}").exists()


def test_what_could_not_be_tried_is_not_recorded():
    code = f"print('CUDA out of memory'); raise SystemExit({record.NOT_TRIED})"
    assert ended(code) == record.Verdict(False, "CUDA out of memory")
    assert record.verdict(record.subject(CUDA, DIMS, BF16)) is None


def test_a_folder_that_cannot_be_written_is_no_record(tmp_path):
    (tmp_path / "cache").write_text("a file in its place")
    found = ended("")
    assert not found.passed and "cannot be recorded" in found.reason and backward() == "triton"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"of": {}, "passed": true, "reason": ""}'])
def test_a_damaged_record_says_nothing(text):
    of = record.subject(CUDA, DIMS, BF16)
    record.write(of, record.Verdict(True))
    of.path.write_text(text)
    assert record.verdict(of) is None and backward() == "triton"


def test_the_trials_command_without_a_gpu_says_so():
    """The real program: no GPU is there, which is no refusal."""
    of = record.subject(CUDA, DIMS, BF16)
    trial = record.trial(of, CUDA)
    while (found := trial.verdict(5.0)) is None:
        pass
    assert not found.passed and "cannot be used" in found.reason and record.verdict(of) is None


def test_records_are_files_that_people_can_read():
    of = record.subject(CUDA, DIMS, BF16)
    record.write(of, record.Verdict(False, "not ended after 900 s"))
    text = json.loads(of.path.read_text())
    assert text["of"]["gpu"] == "NVIDIA H100" and text["reason"] == "not ended after 900 s"
    assert [path.name for path in of.path.parent.iterdir()] == [of.path.name]
