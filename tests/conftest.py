"""What tests of several processes share."""

import pytest
from forking import ForkServer


@pytest.fixture(scope="session")
def fork_server():
    server = ForkServer()
    yield server
    server.close()
