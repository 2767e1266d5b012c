"""`--quick` (`make quick`) leaves out what is marked `slow`: it imports torchtitan, starts processes, or
prepares corpora."""

import contextlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from forking import Rank

SLOW = "pytestmark = pytest.mark.slow"
"""A line of the files that are not even imported then."""


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="leave out what takes long")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: left out by --quick")
    if config.getoption("--quick"):
        config.option.markexpr = "not slow"


def pytest_ignore_collect(collection_path, config):
    if config.getoption("--quick") and collection_path.match("test_*.py"):
        return True if SLOW in collection_path.read_text().splitlines() else None
    return None


def pytest_pycollect_makemodule(module_path):
    """torchtitan picks its device as it is imported, which slow files do."""
    if SLOW in module_path.read_text().splitlines():
        from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

        use_cpu_without_accelerator()


@pytest.fixture(scope="session")
def forms(tmp_path_factory):
    """A folder of `corpora.DOCUMENTS` in four forms, to be read only: `m` of Megatron's, `t.ds` of
    datatrove's, `d` of Hugging Face's, `p` of our own."""
    import corpora

    folder = tmp_path_factory.mktemp("forms")
    corpora.write_datatrove(folder / "t.ds", corpora.DOCUMENTS)
    corpora.write_megatron(folder / "m", corpora.DOCUMENTS)
    corpora.save_dataset(folder / "d")
    corpora.write_prepared(folder / "p", corpora.DOCUMENTS)
    return folder


@pytest.fixture
def forked_ranks(fork_server, tmp_path, monkeypatch):
    """`dryrun`, `rehearse` and traces of layers are forked: each would import torchtitan for seconds."""
    from wlb_titan.runtime import one_rank

    class Forked(contextlib.nullcontext):
        def __init__(self, command, **_):
            super().__init__()
            python, option, program, asked = command
            assert (python, option) == (sys.executable, "-m")
            self._log = tmp_path / f"rank{json.loads(asked)['rank']}.log"
            self._job = fork_server.start([Rank([asked], self._log)], program)

        def communicate(self):
            (self.returncode,) = self._job.wait(300)
            return "", self._log.read_text()

    stand_in = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
    monkeypatch.setattr(one_rank, "subprocess", stand_in)
