"""`wlb-titan train`: an experiment on this machine, by torch's elastic launcher."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import click

from wlb_titan.commands.command_line import NUMBER, command_of_file, of_file


@command_of_file()
@of_file
@click.option(
    "--nproc-per-node",
    "processes",
    type=NUMBER,
    default=0,
    show_default=False,
    metavar="N",
    help="Processes; as many as the parallel degrees need, if not given.",
)
@click.option(
    "--max-restarts",
    type=NUMBER,
    default=0,
    metavar="N",
    help="How often the processes are started again when one is lost.",
)
def train(file: Path, overrides: tuple[str, ...], processes: int, max_restarts: int) -> None:
    """Train on this machine as FILE says, with one line a step.

    Keys on the command line (--training.steps 5) go over the file. Each process takes a GPU; without GPUs,
    the CPU is used. Everything is checked before a process starts; a mistake ends it with exit code 2.

    Ctrl-C, SIGTERM or SIGUSR1 lets the run finish its step, save and end; the same again ends it at once.
    Started again, it goes on where it was. The exit status is 0 when all steps are done, 75 after SIGUSR1 or
    `wlb.stop_after` (start it again), 130 or 143 after Ctrl-C or SIGTERM.
    """
    from wlb_titan.launch.agent import before_torch

    before_torch()
    from wlb_titan.launch.elastic import run
    from wlb_titan.launch.job import PROGRAM, hosts_of

    hosts = hosts_of(str(file), overrides, processes=processes, runs_here=True)
    words = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--rdzv_id", str(uuid.uuid4())]
    words += ["--nproc_per_node", str(hosts.processes), *hosts.restart_words(max_restarts)]
    sys.exit(run([*words, "-m", PROGRAM, "--config", str(file), *overrides]))
