import pytest
from lab import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory, fork_server):
    return Lab(tmp_path_factory.mktemp("lab"), fork_server)
