"""What came of a trial is recorded and found again; its process may pass, refuse, die, hang or not begin."""

import json

import pytest
import torch
from wlb_titan.kernels import record
from wlb_titan.kernels.implementations import chosen, device_of
from wlb_titan.kernels.record import Verdict

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


def subject() -> record.Subject:
    return record.subject(CUDA, DIMS, BF16)


def by_auto(dtype=BF16) -> tuple[str, str]:
    device_of.cache_clear()
    return tuple(chosen(which, "auto", DIMS, dtype, device_of(CUDA)) for which in ("forward", "backward"))


ENDS = {
    "passed": ("echo all right", Verdict(True)),
    "wrong": ("echo dq is 0.3 of its norm wrong; exit 1", Verdict(False, "dq is 0.3 of its norm wrong")),
    "died": ("echo beginning; kill -9 $$", Verdict(False, "ended by signal 9, after: beginning")),
    "silent": ("exit 3", Verdict(False, "no word")),
    "hung": ("trap '' TERM; exec sleep 600", Verdict(False, "not ended after 1 s")),
    "not tried": ("echo CUDA out of memory; exit 75", Verdict(False, "CUDA out of memory")),
}


@pytest.mark.parametrize("end", ENDS)
def test_auto_takes_gluons_backward_only_after_it_has_passed(monkeypatch, tmp_path, end):
    """What could not be tried is not recorded."""
    code, expected = ENDS[end]
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(record.sys, "executable", str(program))
    monkeypatch.setattr(record, "LIMIT", 1.0 if end == "hung" else 60.0)
    assert by_auto() == ("gluon", "triton") and record.verdict(subject()) is None
    assert record.tried(subject(), CUDA) == expected
    assert record.verdict(subject()) == (None if end == "not tried" else expected)
    assert by_auto() == ("gluon", "gluon" if expected.passed else "triton")
    assert by_auto(torch.float16) == ("gluon", "triton")


@pytest.mark.parametrize("field", ["gpu", "driver", "triton", "kernels", "dtype"])
def test_a_record_speaks_of_nothing_else(field):
    """A file that people can read."""
    of = subject()
    assert (of.gpu, of.driver, of.dtype) == ("NVIDIA H100", "550.54.15", "bfloat16")
    record._recorded(of, Verdict(True))
    assert record.verdict(of._replace(**{field: "another"})) is None
    assert json.loads(of.path.read_text())["of"]["gpu"] == "NVIDIA H100"
    assert list(of.path.parent.iterdir()) == [of.path]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"passed": true}'])
def test_a_damaged_record_says_nothing(text):
    record._recorded(subject(), Verdict(True))
    subject().path.write_text(text)
    assert record.verdict(subject()) is None and by_auto() == ("gluon", "triton")


def test_without_a_home_folder_there_is_no_record(monkeypatch):
    """As in a container whose user has no entry in /etc/passwd; the verdict is told all the same."""

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(record.Path, "home", nowhere)
    assert by_auto() == ("gluon", "triton")
    with pytest.warns(UserWarning, match="cannot be recorded, for jobs to read: Could not determine home"):
        assert record._recorded(subject(), Verdict(True)) == Verdict(True)


def test_kernels_are_known_by_their_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "__file__", str(tmp_path / "record.py"))
    found = []
    for text in ("a = 1", "a = 2"):
        (tmp_path / "kernel.py").write_text(text)
        record.sources.cache_clear()
        found.append(record.sources())
    record.sources.cache_clear()
    assert found[0] != found[1]


def test_the_trial_without_a_gpu_says_so():
    """The real program: no GPU is there, which is no refusal."""
    found = record.tried(subject(), CUDA)
    assert not found.passed and "cannot be used" in found.reason and record.verdict(subject()) is None
