import sys

import pytest
from lab import TESTS, Lab, layout, make_corpus  # noqa: F401  some for test_slim.py


@pytest.fixture(scope="session")
def lab(tmp_path_factory, fork_server):
    return Lab(tmp_path_factory.mktemp("lab"), fork_server)


def torchrun(processes: int, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        *arguments,
    ]
