"""Drills: what happens to a job when machines, disks, files and settings are not as they should be.

At the end stands a table: how many were tried in each area, and how many went poorly. A module's `AREA` names
its own; a test that tries many things records their number as `tried` and `poorly`.
"""

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.user_properties.append(("area", item.module.AREA))
    return report


def pytest_terminal_summary(terminalreporter):
    table: dict[str, list[int]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            told = dict(report.user_properties)
            if "area" not in told:  # not a drill
                continue
            row = table.setdefault(told["area"], [0, 0])
            row[0] += told.get("tried", 1)
            row[1] += told.get("poorly", int(report.failed))
    terminalreporter.section("drills")
    terminalreporter.write_line(f"{'area':44} {'tried':>6} {'well':>6} {'poorly':>7}")
    for area, (tried, poorly) in sorted(table.items()):
        terminalreporter.write_line(f"{area:44} {tried:6} {tried - poorly:6} {poorly:7}")
