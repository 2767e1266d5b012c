"""Two hosts, of which one is told to stop, or goes; and one that loses a rank: our agents, as TorchX does."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from drill_ground import PATIENCE
from forking import await_, command, environment, free_port
from lab import Run
from wlb_titan.launch import job

from wlb_titan.errors import EXIT_USER_ERROR

UNSAVED = ("--checkpoint.interval", "1000")


class Hosts(Run):
    """The agents of two hosts, of one rank each, that train into one dump folder."""

    def __init__(self, ground, name: str) -> None:
        super().__init__(ground.folder / name)
        self.config, self.agents = ground.config, []

    def start(self, *words: str, may_be_lost: bool = False) -> None:
        """Starts both; if one may be lost, the other goes on alone."""
        port = free_port()
        arguments = ["--nnodes", "1:2" if may_be_lost else "2:2", "--nproc_per_node", "1"]
        arguments += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}", "--rdzv_id", "drill"]
        arguments += job.Hosts(1, 2, 1, on_cpu=True).restart_words(3) if may_be_lost else []
        arguments += ["-m", job.PROGRAM, "--config", str(self.config)]
        arguments += ["--dump_folder", str(self.folder), *words]
        self.agents = []
        for number in range(2):
            with self.folder.with_suffix(f".host{number}").open("a") as log:
                self.agents.append(command(job.AGENT, *arguments, log=log, start_new_session=True))
            # The first host holds the rendezvous, as its name does where each host has a name of its own.
            await_(lambda: is_open(port), self.log, PATIENCE)

    def log(self, *hosts: int) -> str:
        return "\n".join(self.folder.with_suffix(f".host{host}").read_text() for host in hosts or (0, 1))

    def await_a_step(self) -> None:
        await_(self.metrics, self.log, PATIENCE)


def is_open(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("localhost", port)) == 0


@pytest.fixture
def hosts(ground, request):
    hosts = Hosts(ground, request.node.name)
    yield hosts
    for agent in hosts.agents:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


@pytest.mark.long
def test_a_host_that_is_told_to_stop_stops_both(ground, hosts):
    """Both agents end with the same status and start nothing again, though they may; later they go on."""
    hosts.start(*UNSAVED, may_be_lost=True)
    hosts.await_a_step()
    hosts.agents[1].send_signal(signal.SIGTERM)
    assert [agent.wait(PATIENCE) for agent in hosts.agents] == [143, 143], hosts.log()
    assert "all is saved" in hosts.log()
    hosts.start(*UNSAVED)
    assert [agent.wait(PATIENCE) for agent in hosts.agents] == [0, 0], hosts.log()
    assert hosts.losses() == ground.undisturbed.losses()


@pytest.mark.long
def test_a_lost_host_costs_time_and_no_document(ground, hosts):
    """SIGKILL of a host's agent, which asks nobody to end: its rank ends by itself. The other goes on alone,
    with half of the data-parallel ranks, from the newest checkpoint. Losses are those of a run that never
    lost one, but for the order of sums."""
    words = ["--training.global_batch_size", "4", "--parallelism.data_parallel_shard_degree", "-1"]
    words += ["--checkpoint.interval", "1", "--training.steps", "12"]
    never = ground.run("never-lost", *words)
    hosts.start(*words, may_be_lost=True)
    hosts.await_a_step()
    hosts.agents[1].send_signal(signal.SIGKILL)
    assert hosts.agents[0].wait(PATIENCE) == 0, hosts.log()
    assert "Loading the checkpoint" in hosts.log(0)
    assert hosts.losses() == pytest.approx(never.losses(), rel=1e-3)
    assert not running(hosts.folder)


def test_a_command_that_loses_a_rank_goes_on_by_itself(ground):
    run = Run(ground.folder / "restarted")
    words = ["--nproc-per-node", "1", "--max-restarts", "1", "--dump_folder", str(run.folder)]
    words += ["--parallelism.data_parallel_shard_degree", "1", "--training.local_batch_size", "4"]
    words = ["wlb_titan.commands.main", "train", ground.config, *words]
    log = run.folder.with_suffix(".log")
    with log.open("w") as file:
        train = command(*words, log=file, env=environment())
    try:
        await_(lambda: len(run.metrics()) >= 3, log.read_text, 2 * PATIENCE)
        rank = next(line for line in running(run.folder) if job.PROGRAM in line.read_text())
        os.kill(int(rank.parent.name), signal.SIGKILL)
        assert train.wait(2 * PATIENCE) == 0, log.read_text()
    finally:
        train.terminate()
    assert "Loading the checkpoint" in log.read_text()
    assert run.losses() == pytest.approx(ground.undisturbed.losses(), rel=1e-3)


LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-m", "wlb_titan.runtime.train", *sys.argv[1:]])
print(rank.pid, flush=True)
rank.wait()
"""


def test_a_rank_ends_with_its_launcher_while_it_waits_for_the_others(ground):
    words = [sys.executable, "-c", LAUNCHER, "--config", str(ground.config)]
    others = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    launcher = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment() | others)
    rank = Path("/proc", launcher.stdout.readline().strip())
    await_(lambda: "libtorch" in (rank / "maps").read_text(), str, PATIENCE)
    launcher.kill()
    ended = lambda: not rank.exists() or "(zombie)" in (rank / "status").read_text()  # noqa: E731
    await_(ended, str, patience=60)  # in which it would still wait


@pytest.mark.parametrize(("status", "starts"), [(EXIT_USER_ERROR, 1), (1, 3)])
def test_a_users_mistake_is_not_started_again_as_a_failure_is(tmp_path, status, starts):
    program, started = tmp_path / "rank.py", tmp_path / "started"
    program.write_text(f"print(1, file=open({str(started)!r}, 'a'))\nraise SystemExit({status})")
    words = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--nproc_per_node", "1"]
    words += [*job.Hosts(1, 1, 1, on_cpu=True).restart_words(2), str(program)]
    assert subprocess.run([sys.executable, "-m", job.AGENT, *words], timeout=PATIENCE).returncode == status
    assert len(started.read_text().splitlines()) == starts


def running(folder: Path) -> list[Path]:
    """Processes that have a folder in their command line."""
    found = []
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [words] if f"{folder}\0" in words.read_text() else []
    return found
