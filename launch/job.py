"""A job before it starts, for every way of starting it: checked, sized, and in the launcher's words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from wlb_titan.cost.cluster import UNKNOWN
from wlb_titan.errors import UserError

PROGRAM = "wlb_titan.runtime.train"
AGENT = "wlb_titan.launch.agent"
LAST_CALL = 10  # seconds that hosts wait for one more, once there are enough of them


class Hosts(NamedTuple):
    """Hosts of a job."""

    fewest: int  # with which it goes on when others are lost
    nodes: int
    processes: int  # on each host
    on_cpu: bool  # whether processes want the CPU even where there are GPUs
    resumes: bool = True  # whether the run, started again, goes on from a checkpoint that it saved
    folder: str = ""  # where it writes
    words: tuple[str, ...] = ()  # of the program

    def restart_words(self, max_restarts: int) -> list[str]:
        """The agent's words for a job that goes on when a host or rank is lost; none where it does not."""
        if not max_restarts and self.fewest == self.nodes:
            return []
        return ["--max_restarts", str(max_restarts), "--rdzv_conf", f"last_call_timeout={LAST_CALL}"]


def hosts_of(
    config: str,
    overrides: Sequence[str] = (),
    *,
    nnodes: str | None = "1",
    processes: int = 0,
    is_here: bool = True,
    runs_here: bool = False,
    waits: bool = False,
) -> Hosts:
    """Checks an experiment before it is started or submitted, and sizes its job.

    Args:
        nnodes: number of hosts, or MIN:N; None for as few as the degrees need.
        processes: on each host, at most without `nnodes`; 0 for as many as the degrees need.
        is_here: whether the job will see this machine's files, so that the corpus can be checked.
        runs_here: whether it will find this machine's GPUs.
        waits: whether it trains as its files are now, in the dump folder, whatever they are when it starts.
    """
    from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

    use_cpu_without_accelerator()
    from wlb_titan.runtime.checks import validate_files, validate_machine
    from wlb_titan.runtime.dump_folder import submitted
    from wlb_titan.runtime.models.load import load_config

    if processes < 0:
        raise UserError(f"--nproc-per-node: at least 0 (as many as are needed); got {processes}.")
    fewest, nodes = (0, 0) if nnodes is None else _range(nnodes)
    world_size = nodes * processes
    words = ("--config", config, *overrides)  # without what is only for the checks here
    if not runs_here and _takes_the_cpu_at_hand(config, overrides):
        overrides = [*overrides, "--wlb.cluster", UNKNOWN]
    resolved = load_config(config, overrides, world_size=world_size or None)
    job = resolved.told(resolved.job)
    if is_here:
        resolved.check(lambda config: validate_files(config, job))
    if not world_size:
        world_size = job.degrees.ranks
        nodes = nodes or -(-world_size // processes)
        fewest = fewest or nodes
        if world_size % nodes != 0:
            raise UserError(f"--nnodes: {world_size} processes do not spread evenly over {nodes} hosts.")
    if runs_here:
        resolved.check(lambda config: validate_machine(config, job, world_size // nodes))
    for fewer in range(fewest, nodes):
        _check_fewer(config, overrides, world_size, fewer * world_size // nodes)
    on_cpu, checkpoint = resolved.config.wlb.device == "cpu", resolved.config.checkpoint
    resumes = checkpoint.enable and not checkpoint.load_only and checkpoint.load_step == -1
    resumes = resumes and not resolved.config.wlb.bench.policies
    folder = resolved.config.dump_folder
    if waits:
        text = load_config(config, words[2:]).to_toml()
        words = ("--config", str(submitted(Path(folder), text)))
    return Hosts(fewest, nodes, world_size // nodes, on_cpu, resumes, folder, words)


def _range(nnodes: str) -> tuple[int, int]:
    """Least and most hosts of torchrun's `N` or `MIN:N`."""
    match = re.fullmatch(r"(?:(\d+):)?(\d+)", nnodes)
    most = int(match[2]) if match else 0
    fewest = int(match[1] or most) if match else 0
    if not 1 <= fewest <= most:
        raise UserError(f"--nnodes: a number of hosts, or MIN:N with MIN from 1 to N; got {nnodes!r}.")
    return fewest, most


def _takes_the_cpu_at_hand(config: str, overrides: Sequence[str]) -> bool:
    """Whether a job for GPUs elsewhere would be checked on the times of a login node's CPU."""
    from wlb_titan.runtime.configured import gpu_at_hand
    from wlb_titan.toml.sources import read_sources

    written = read_sources(config, overrides).written()
    named = written.get("wlb.cluster") or written.get("wlb.device") == "cpu"
    return not named and gpu_at_hand() is None


def _check_fewer(config: str, overrides: Sequence[str], world_size: int, fewer: int) -> None:
    """Refuses a job that cannot go on with fewer processes, on the same global batch."""
    from wlb_titan.runtime.models.load import load_config

    try:
        resolved = load_config(config, overrides, world_size=fewer)
    except UserError as error:
        raise UserError(f"With {fewer} processes, as few as --nnodes allows: {error}") from error
    if resolved.config.training.global_batch_size <= 0:
        raise UserError(
            "training.global_batch_size: set it where hosts may be lost. Without it a step of "
            f"{fewer} processes would have fewer micro-batches than one of {world_size}."
        )
