"""`wlb-titan train`: an experiment on this machine, by torch's elastic launcher; and `wlb-titan slurm`: the
batch script of a job, one component of N nodes."""

from __future__ import annotations

import re
import shlex
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import click

from wlb_titan.commands.command_line import NUMBER, POSITIVE, OfFile, show_table
from wlb_titan.commands.compare import bench_of
from wlb_titan.commands.page import template
from wlb_titan.errors import EXIT_AGAIN, UserError
from wlb_titan.summary import bench_rows

PATIENCE = 120  # seconds that srun gives other tasks when one has ended; they end by themselves sooner
LONGEST_NOTICE = 65535  # seconds, of sbatch

OURS = ("nodes", "ntasks", "ntasks-per-node", "time", "signal", "requeue", "no-requeue", "no-kill")
"""Options of sbatch on which the script depends."""


@click.command(cls=OfFile)
@click.option(
    "--nproc-per-node",
    "processes",
    type=POSITIVE,
    default=8,
    help='Most processes per node, each with a GPU; without GPUs if wlb.device = "cpu".',
)
@click.option(
    "--nnodes",
    metavar="[MIN:]N",
    help="Nodes of the job; by default as many as the degrees need. It keeps running with as few as MIN.",
)
@click.option(
    "--max-restarts",
    type=NUMBER,
    default=0,
    help="How often the nodes may restart their processes from the newest checkpoint.",
)
@click.option("--time", default="24:00:00", help="Time limit of the job.")
@click.option(
    "--notice",
    type=click.IntRange(1, LONGEST_NOTICE),
    default=300,
    help="Seconds before the limit at which the run is told to stop: more than a step and a save take.",
)
@click.option("-o", "sbatch", multiple=True, metavar="NAME=VALUE", help="Another option of sbatch.")
def slurm(
    file: Path,
    overrides: tuple[str, ...],
    processes: int,
    nnodes: str | None,
    max_restarts: int,
    time: str,
    notice: int,
    sbatch: tuple[str, ...],
) -> None:
    """Write the batch script of a job for Slurm: wlb-titan slurm job.toml -o partition=gpu > job.sbatch

    The job is one allocation of N nodes with one task per node. Before its time is up the run finishes its
    step and saves; the job is requeued and resumes by itself. It trains by FILE as it is now, which is kept
    in the dump folder: write the script again after a change. The folder in which you call sbatch, and this
    Python environment, must be on a file system that every node sees.
    """
    from wlb_titan.launch.job import AGENT, PROGRAM, hosts_of
    from wlb_titan.runtime.ends import seconds_of

    if notice >= seconds_of(time, "--time"):
        raise UserError(f"--notice: {notice} s before the end of --time {time} is before the run begins.")
    given = dict(map(_option, sbatch))
    hosts = hosts_of(str(file), overrides, nnodes=nnodes, processes=processes, waits=True)
    survives = hosts.fewest < hosts.nodes
    options = {
        "job-name": file.stem,
        "nodes": str(hosts.nodes),
        "ntasks-per-node": "1",
        **({} if hosts.on_cpu else {"gpus-per-node": str(hosts.processes)}),
        "time": time,
        "signal": f"USR1@{notice}",
        "requeue": "",
        "open-mode": "append",
        "output": "%x-%j.out",
        **({"no-kill": ""} if survives else {}),
        **whole_nodes(given),
        **given,
    }
    agent = [sys.executable, "-m", AGENT, "--nnodes", f"{hosts.fewest}:{hosts.nodes}"]
    agent += ["--nproc_per_node", str(hosts.processes), *hosts.restart_words(max_restarts)]
    comments = [f"# Written by: {shlex.join(['wlb-titan', *sys.argv[1:]])}"]
    comments += [f"#SBATCH --{name}{value and f'={shlex.quote(value)}'}" for name, value in options.items()]
    script = template("job.sbatch").render(
        comments=[line.replace("\n", " ") for line in comments],  # what follows a \n would run
        srun=f"--kill-on-bad-exit=0 --wait={0 if survives else PATIENCE}{' --no-kill' * survives}",
        agent=shlex.join(agent),
        program=shlex.join(["-m", PROGRAM, *hosts.words]),
        resumes=hosts.resumes,
        exit_again=EXIT_AGAIN,
    )
    click.echo(script, nl=False)


def _option(text: str) -> tuple[str, str]:
    """Name and value of an option of sbatch; refuses those that the script sets."""
    match = re.fullmatch(r"-{0,2}([a-z][a-z-]+)(?:=(.+))?", text)
    if match is None or match[1] in OURS:
        raise UserError(
            f"-o: write NAME=VALUE, with the long name of an option of sbatch that is not set by this "
            f"command itself ({', '.join(OURS)}); got {text!r}."
        )
    return match[1], match[2] or ""


def whole_nodes(given: Mapping[str, str]) -> dict[str, str]:
    """All cores and all memory of a node, unless others are asked for: Slurm would give the ranks of a node
    one core together, and the memory that belongs to it."""
    if any(name.startswith("cpus-per") for name in given):
        return {}
    return {"exclusive": ""} | ({} if any(name.startswith("mem") for name in given) else {"mem": "0"})


@click.command(cls=OfFile)
@click.option(
    "--nproc-per-node",
    "processes",
    type=NUMBER,
    default=0,
    show_default=False,
    metavar="N",
    help="Processes; by default as many as the parallel degrees need.",
)
@click.option(
    "--max-restarts",
    type=NUMBER,
    default=0,
    metavar="N",
    help="How often the processes may restart when one is lost.",
)
def train(file: Path, overrides: tuple[str, ...], processes: int, max_restarts: int) -> None:
    """Train on this machine as FILE says, printing one line per step.

    Command-line values (--training.steps 5) override the file. Each process takes a GPU; without GPUs, the
    CPU is used. Everything is checked before a process starts; a mistake ends the command with exit code 2.

    At Ctrl-C, SIGTERM or SIGUSR1 the run finishes its step, saves and ends; a second signal stops it
    immediately. Run the same command again to resume. The exit status is 0 when all steps are done, 75 after
    SIGUSR1 or `wlb.stop_after` (run it again), 130 or 143 after Ctrl-C or SIGTERM.
    """
    status, _ = run_here(file, overrides, processes, max_restarts)
    sys.exit(status)


@click.command(cls=OfFile)
@click.option(
    "--policies",
    required=True,
    metavar="POLICY,...",
    help="Policies that take turns; the first is the baseline.",
)
@click.option("--rounds", default="8", help="Steps of each policy, after a first one that does not count.")
def bench(file: Path, overrides: tuple[str, ...], policies: str, rounds: str) -> None:
    """Compare policies of FILE's job on this machine: they take turns, one step each.

    They share one model, whose weights stay, and its process groups, so drift of the machine's speed affects
    all of them alike. Writes bench.json to the dump folder, which must not contain a run. On clusters: torchx
    run wlb.bench, or the key wlb.bench.policies with slurm.
    """
    words = ("--wlb.bench.policies", policies or ",", "--wlb.bench.rounds", rounds)  # "" is no bench there
    status, folder = run_here(file, (*overrides, *words))
    if status == 0:
        show_table(bench_rows(bench_of(folder)[0]))
    sys.exit(status)


def run_here(
    file: Path, overrides: tuple[str, ...], processes: int = 0, max_restarts: int = 0
) -> tuple[int, Path]:
    """Runs a job on this machine; its exit status and its dump folder."""
    from wlb_titan.launch.agent import before_torch

    before_torch()
    from wlb_titan.launch.elastic import run
    from wlb_titan.launch.job import PROGRAM, hosts_of

    hosts = hosts_of(str(file), overrides, processes=processes, runs_here=True)
    words = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--rdzv_id", str(uuid.uuid4())]
    words += ["--nproc_per_node", str(hosts.processes), *hosts.restart_words(max_restarts)]
    return run([*words, "-m", PROGRAM, *hosts.words]), Path(hosts.folder)
