"""Two hosts, of which one is told to stop, or goes: two of our agents, as TorchX starts them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from drill_ground import PATIENCE, Run, await_
from forking import free_port
from wlb_titan.launch.job import AGENT, PROGRAM, restart_words

UNSAVED = ["--checkpoint.interval", "1000"]


@pytest.fixture
def hosts(ground):
    """Starts an agent of one rank for each host, with overrides of its own."""
    agents = []

    def start(name: str, *words: list[str], may_be_lost: bool = False) -> list[subprocess.Popen]:
        endpoint = f"localhost:{free_port()}"
        for number, own in enumerate(words):
            arguments = ["--nnodes", f"{1 if may_be_lost else 2}:2", "--nproc_per_node", "1"]
            arguments += ["--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", name]
            arguments += restart_words(2, 1, 3) if may_be_lost else []
            arguments += ["-m", PROGRAM, "--config", str(ground.config)]
            arguments += ["--dump_folder", str(ground.folder / name), *own]
            with (ground.folder / f"{name}.host{number}.log").open("a") as log:
                agents.append(
                    subprocess.Popen(
                        [sys.executable, "-m", AGENT, *arguments],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                        start_new_session=True,
                    )
                )
            # The first host holds the rendezvous, as its name does where each host has a name of its own.
            await_(lambda: is_open(endpoint), lambda: (ground.folder / f"{name}.host0.log").read_text())
        return agents[-len(words) :]

    yield start
    for agent in agents:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def is_open(endpoint: str) -> bool:
    host, _, port = endpoint.partition(":")
    with socket.socket() as caller:
        return caller.connect_ex((host, int(port))) == 0


def logs(ground, name: str) -> list[str]:
    return [(ground.folder / f"{name}.host{number}.log").read_text() for number in range(2)]


def test_a_host_that_is_told_to_stop_stops_both(ground, hosts, undisturbed):
    """Both agents end with the same status and start nothing again, though they may; later they go on."""
    agents = hosts("told-host", *[UNSAVED] * 2, may_be_lost=True)
    run = Run(ground.folder / "told-host")
    await_(lambda: bool(run.steps()), lambda: "\n".join(logs(ground, "told-host")))
    agents[1].send_signal(signal.SIGTERM)
    assert [agent.wait(PATIENCE) for agent in agents] == [143, 143], logs(ground, "told-host")
    assert "all is saved" in "\n".join(logs(ground, "told-host"))
    agents = hosts("told-host", *[UNSAVED] * 2)
    assert [agent.wait(PATIENCE) for agent in agents] == [0, 0]
    assert run.losses() == undisturbed.losses()


def test_a_lost_host_costs_time_and_no_document(ground, hosts):
    """SIGKILL of a host's agent, which asks nobody to end: its rank ends by itself. The other goes on alone,
    with half of the data-parallel ranks, from the newest checkpoint. Losses are those of a run that never
    lost one, but for the order of sums."""
    words = ["--training.global_batch_size", "4", "--parallelism.data_parallel_shard_degree", "-1"]
    words += ["--checkpoint.interval", "1", "--training.steps", "12"]
    never = ground.run("never-lost", *words)
    agents = hosts("lost-host", *[words] * 2, may_be_lost=True)
    run = Run(ground.folder / "lost-host")
    await_(lambda: bool(run.steps()), lambda: "\n".join(logs(ground, "lost-host")))
    agents[1].send_signal(signal.SIGKILL)
    assert agents[0].wait(PATIENCE) == 0, logs(ground, "lost-host")
    assert "Loading the checkpoint" in logs(ground, "lost-host")[0]
    assert run.losses() == pytest.approx(never.losses(), rel=1e-3)
    assert not alive("lost-host")


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
