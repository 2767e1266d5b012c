"""Drills: what happens to a job when machines, disks, files and settings are not as they should be."""

import pytest
from drill_ground import Ground


@pytest.fixture(scope="session")
def ground(tmp_path_factory, fork_server):
    return Ground(tmp_path_factory.mktemp("ground"), fork_server)
