import pytest
from lab import Lab

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()  # before a test module imports torchtitan


@pytest.fixture(scope="session")
def lab(tmp_path_factory, fork_server):
    return Lab(tmp_path_factory.mktemp("lab"), fork_server)
