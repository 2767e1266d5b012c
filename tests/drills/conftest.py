"""Drills: what happens to a job when machines, disks, files and settings are not as they should be."""

import pytest
from drill_ground import Ground

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()


@pytest.fixture(scope="session")
def ground(tmp_path_factory, fork_server):
    return Ground(tmp_path_factory.mktemp("ground"), fork_server)


@pytest.fixture(scope="session")
def undisturbed(ground):
    """A run that nothing happens to."""
    job = ground.run("undisturbed")
    assert job.codes == [0, 0], job.log()
    return job
