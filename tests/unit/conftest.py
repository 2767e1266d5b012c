"""`--quick` (`make quick`) leaves out the files that take long: they import torchtitan, start processes, or
prepare corpora."""

import contextlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
from forking import Rank

SLOW = {
    "test_activation_checkpoint.py",
    "test_adoption.py",
    "test_compat.py",
    "test_compile_lengths.py",
    "test_config_known.py",
    "test_config_torchtitan.py",
    "test_corpus_foreign.py",
    "test_dryrun.py",
    "test_gradients.py",
    "test_implementation.py",
    "test_launch.py",
    "test_memory_check.py",
    "test_plan_command.py",
    "test_mixture_config.py",
    "test_prepare.py",
    "test_prepare_parallel.py",
    "test_profile.py",
    "test_rehearsal.py",
    "test_rotary.py",
    "test_same_plans.py",
    "test_simulate_command.py",
    "test_stop.py",
    "test_timeouts.py",
    "test_weights.py",
}


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="leave out the files that take long")


def pytest_ignore_collect(collection_path, config):
    return True if config.getoption("--quick") and collection_path.name in SLOW else None


@pytest.fixture
def forked_ranks(fork_server, tmp_path, monkeypatch):
    """`dryrun` and `rehearse` with ranks that are forked: each would import torchtitan for seconds."""
    from wlb_titan.commands import lone_ranks

    class Forked(contextlib.nullcontext):
        def __init__(self, command, **_):
            super().__init__()
            python, option, program, *words = command
            assert (python, option) == (sys.executable, "-m")
            self._log = tmp_path / f"rank{words[words.index('--rank') + 1]}.log"
            self._job = fork_server.start([Rank(words, self._log)], program)

        def communicate(self, timeout):
            (self.returncode,) = self._job.wait(300)
            return "", self._log.read_text()

    stand_in = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
    monkeypatch.setattr(lone_ranks, "subprocess", stand_in)
