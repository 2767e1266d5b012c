"""Two hosts, of which one lacks the corpus, or goes: two of our agents, as TorchX starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from drill_ground import PATIENCE, Run, await_
from forking import free_port

AREA = "two hosts"


@pytest.fixture
def hosts(ground):
    """Starts an agent of one rank for each host, with overrides of its own."""
    agents = []

    def start(name: str, *words: list[str]) -> list[subprocess.Popen]:
        agent = Path(sys.executable).parent / "wlb-agent"
        endpoint = f"localhost:{free_port()}"
        for number, own in enumerate(words):
            arguments = ["--nnodes", "2", "--nproc_per_node", "1", "--node_rank", str(number)]
            arguments += ["--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", name]
            arguments += ["-m", "wlb_titan.runtime.train", "--config", str(ground.config)]
            arguments += ["--dump_folder", str(ground.folder / name), *own]
            with (ground.folder / f"{name}.host{number}.log").open("w") as log:
                agents.append(
                    subprocess.Popen(
                        [str(agent), *arguments],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                        start_new_session=True,
                    )
                )
        return agents

    yield start
    for agent in agents:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def logs(ground, name: str) -> list[str]:
    return [(ground.folder / f"{name}.host{number}.log").read_text() for number in range(2)]


def test_one_host_lacks_the_corpus(ground, hosts):
    """Its rank says so, with the host's name, and both hosts end."""
    agents = hosts("lacking", [], ["--wlb.corpus.path", "/nowhere"])
    assert all(agent.wait(PATIENCE) for agent in agents)
    told = "\n".join(logs(ground, "lacking"))
    assert told.count("There is no corpus at /nowhere") == 1, told
    assert "error: rank" in told and "on host" in told
    assert "Traceback" not in told


def test_a_host_that_is_gone_ends_the_other(ground, hosts):
    """SIGKILL of one agent, which asks nobody to end: its rank ends by itself, and so does the other host."""
    agents = hosts("gone-host", *[["--training.steps", "100000"]] * 2)
    run = Run(ground.folder / "gone-host")
    await_(lambda: len(run.steps()) > 1, lambda: "\n".join(logs(ground, "gone-host")))
    agents[1].send_signal(signal.SIGKILL)
    assert agents[0].wait(PATIENCE)
    await_(lambda: not alive("gone-host"), lambda: "\n".join(logs(ground, "gone-host")))


def alive(name: str) -> list[int]:
    """Processes whose command line has the name of a dump folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"/{name}\0" in (process / "cmdline").read_text():
                found.append(int(process.name))
        except OSError:
            continue
    return found
