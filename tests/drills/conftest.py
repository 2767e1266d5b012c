"""Drills: what happens to a job when machines, disks, files and settings are not as they should be."""

import pytest
from drill_ground import Ground


@pytest.fixture(scope="session")
def ground(tmp_path_factory):
    place = Ground(tmp_path_factory.mktemp("ground"))
    yield place
    place.close()


@pytest.fixture(scope="session")
def undisturbed(ground):
    """A run that nothing happens to."""
    job = ground.run("undisturbed")
    assert job.codes == [0, 0], job.log()
    return job
