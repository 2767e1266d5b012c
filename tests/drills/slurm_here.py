"""A Slurm of two nodes on this machine, with munge, ports and files of its own: Debian's slurm-wlm and munge
have all that it needs, and nothing is read from /etc. Any user may start it, whose jobs alone it runs."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from forking import await_, free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where a user's own PATH may not look

CONFIG = """
ClusterName=drill
SlurmctldHost={host}({address})
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
FirstJobId={first}
KillWait=5
NodeName={host} NodeAddr={address} Port={ports[1]} CPUs=1
NodeName={host}-2 NodeAddr={address} Port={ports[2]} CPUs=1
PartitionName=drill Nodes=ALL Default=YES State=UP
"""
"""The first node has the name of this machine, which alone can be looked up; lists of both begin with it."""


class Slurm:
    """Calls a Slurm that runs, with its configuration, state and logs in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._setting = f"SLURM_CONF={folder}/slurm.conf"
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": f"{folder}/slurm.conf"}

    def call(self, *words: str) -> str:
        """What a command prints; it has to succeed."""
        done = subprocess.run(words, env=self.environment, cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def start(self, *words: str) -> subprocess.Popen:
        """Starts a daemon, in the foreground."""
        with (self.folder / "daemons.log").open("a") as log:
            how = {"stdout": log, "stderr": log, "start_new_session": True}
            return subprocess.Popen(words, env=self.environment, **how)

    def logs(self) -> str:
        return "\n".join(log.read_text(errors="replace")[-4000:] for log in self.folder.glob("*.log"))

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.partition("=")[::2] for word in words)

    def processes(self, *settings: str) -> list[int]:
        """The processes of its daemons and jobs that have these settings in their environment."""
        found, wanted = [], {setting.encode() for setting in (self._setting, *settings)}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted <= set((process / "environ").read_bytes().split(b"\0")):
                    found.append(int(process.name))
        return found


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Starts a Slurm in an empty folder; at the end all of its daemons and jobs are gone.

    The folder's path is short: munge's socket lies in it.
    """
    if lacking := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        pytest.skip(f"no {', '.join(lacking)} on this machine: apt-get install slurm-wlm munge")
    host = socket.gethostname().partition(".")[0]
    try:
        address = socket.gethostbyname(host)
    except OSError:
        pytest.skip(f"the name of this machine, {host}, cannot be looked up")
    ports = [free_port() for _ in range(3)]
    # `wlb-titan slurm` has the rendezvous listen on 20000 + the job's number.
    rendezvous = next(port for port in iter(free_port, None) if 20000 < port < 30000)
    names = {"folder": folder, "host": host, "address": address, "user": getpass.getuser()}
    (folder / "slurm.conf").write_text(CONFIG.format(**names, ports=ports, first=rendezvous - 20000))
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    here = Slurm(folder)
    munge = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed", "key-file": "key"}
    files = [f"--{option}={folder}/munge.{file}" for option, file in munge.items()]
    daemons = [here.start("munged", "--foreground", "--force", *files)]
    try:
        await_(lambda: (folder / "munge.socket").exists(), here.logs)
        daemons.append(here.start("slurmctld", "-D"))
        daemons += [here.start("slurmd", "-D", "-N", name) for name in (host, f"{host}-2")]
        await_(lambda: is_ready(here), here.logs)
        yield here
    finally:
        await_(lambda: not killed(here, daemons), here.logs)


def is_ready(here: Slurm) -> bool:
    idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    return subprocess.run(idle, env=here.environment, capture_output=True, text=True).stdout.strip() == "2"


def killed(here: Slurm, daemons: list[subprocess.Popen]) -> list[int]:
    """The processes that were there still; they have been killed."""
    for process in (found := here.processes()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for daemon in daemons:
        daemon.poll()
    return found
