"""What tests of several processes share, and how hypothesis looks for counterexamples.

All tests run on the CPU, also on machines with GPUs, but for those of tests/gpu with `--device cuda`.
"""

import os

import pytest
from forking import ForkServer
from hypothesis import settings

# This file comes first, before anything asks for a device, or imports torch. A second thread would only wait
# for the core that the other worker has, or another process of the job.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, so that a change is judged by itself; others in `make counterexamples`. No
# deadlines: on a busy machine any example may be slow.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("others", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("same")

MAY_LACK = (
    *("apt-get install slurm-wlm munge", "cannot be looked up"),
    *("root may read everything", "GPU", "needs a CUDA device", "the Gluon kernels have head dims"),
)
"""Words of the reasons for which a test may be skipped: what machines lack, and kernels cannot."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that is skipped for another reason fails: it would hide what it should find."""
    report = yield
    if report.skipped and not any(words in str(report.longrepr) for words in MAY_LACK):
        report.outcome, report.longrepr = "failed", f"skipped for no reason of MAY_LACK: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def fork_server():
    server = ForkServer()
    yield server
    server.close()
