"""What tests of several processes share, and how hypothesis looks for counterexamples.

All tests run on the CPU, also on machines with GPUs, but for those of tests/gpu with `--device cuda`.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import pytest
from forking import ForkServer
from hypothesis import settings

# This file comes first, before anything asks for a device, or imports torch. A second thread would only wait
# for the core that the other worker has, or another process of the job.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache" / "accounts")

# The same examples in every run, so that a change is judged by itself; others in `make counterexamples`. No
# deadlines: on a busy machine any example may be slow.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("others", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("same")

MAY_LACK = (
    *("apt-get install slurm-wlm munge", "cannot be looked up"),
    *("root may read everything", "GPU", "needs a CUDA device", "head dim", "flash-attn-4"),
)
"""Words of the reasons for which a test may be skipped: what machines lack, and kernels cannot."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that is skipped for another reason fails: it would hide what it should find."""
    report = yield
    if report.skipped and not any(words in str(report.longrepr) for words in MAY_LACK):
        report.outcome, report.longrepr = "failed", f"skipped for no reason of MAY_LACK: {report.longrepr}"
    return report


ESCAPES = re.compile(r"\x1b\[[\d;?]*\w")
PACE = re.compile(r"([^\r\n]+?) +[━╸╺]+ [\d:]+ [\d,]+ of [\d,]+, [\d,.]+/s, [\d:]+ left")


@pytest.fixture
def on_terminal(monkeypatch):
    """Runs a command whose stderr is a terminal: what it prints, and the activities of which the terminal
    shows a rate and the time left, before it is clean again."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")

    def received(end: int) -> str:
        text = b""
        with suppress(OSError), open(end, "rb", buffering=0) as terminal:  # until it is closed
            while True:
                text += terminal.read(4096)
        return text.decode()

    def run(*words):
        from wlb_titan.commands.main import main

        ours, theirs = os.openpty()
        with ThreadPoolExecutor(1) as pool:
            shown = pool.submit(received, ours)
            with open(theirs, "w") as stderr, redirect_stderr(stderr), redirect_stdout(StringIO()) as stdout:
                main(list(map(str, words)), standalone_mode=False)
        assert shown.result().endswith("\x1b[2K"), "the bar is still there"
        return stdout.getvalue(), set(PACE.findall(ESCAPES.sub("", shown.result())))

    return run


@pytest.fixture(scope="session")
def fork_server():
    server = ForkServer()
    yield server
    server.close()
