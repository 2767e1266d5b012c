"""The memory of a run on its devices: predicted before anything is built, and measured while it trains."""

from __future__ import annotations

import math
import resource
from dataclasses import replace

import torch
import torch.distributed as dist

from wlb_titan.errors import PlanError, UserError
from wlb_titan.job import Job
from wlb_titan.memory.fits import Fitting, in_a_line
from wlb_titan.memory.rank import GIB, RankMemory
from wlb_titan.plan import Plan
from wlb_titan.runtime.agreement import check_same
from wlb_titan.runtime.dataloader import Step
from wlb_titan.runtime.meshes import Dims
from wlb_titan.simulator.replicas import rank_memory


def planned_memory(job: Job, plan: Plan, replica: int) -> tuple[RankMemory, ...] | None:
    """The peak of each pipeline rank, with a plan's micro-batches for one data-parallel rank. None if it is
    unknown: of a model whose layers the formulas do not know, or where the order of passes is not known."""
    try:
        return rank_memory(job, plan, replica) if job.memory_known else None
    except PlanError:
        return None


def check_memory(job: Job, device_bytes: int) -> None:
    """Refuses a job of which not even context windows fit a device of so many bytes."""
    if job.memory_known:
        _fitting(job, device_bytes).check_window()


def check_planned_memory(job: Job, plan: Plan, replica: int, rank: int, device_bytes: int) -> None:
    """Refuses a step that is predicted not to fit."""
    ranks, fitting = planned_memory(job, plan, replica), _fitting(job, device_bytes)
    if ranks is not None and ranks[rank].total > fitting.usable:
        prediction = in_a_line(ranks[rank])
        raise UserError(
            f"Step {plan.iteration + 1} cannot fit {fitting.room}; the prediction is {prediction}."
        )


def _fitting(job: Job, device_bytes: int) -> Fitting:
    return job.on(replace(job.cluster, memory=device_bytes)).fitting


def measured_memory(dims: Dims, device: torch.device, step: Step, repeated: float | None) -> dict[str, float]:
    """The peak of each pipeline rank in GiB: of allocated memory since the last report or, on the CPU, of the
    process's resident memory; and the share of its layers that repeated something, if that was chosen. Every
    rank calls it; it also compares the digests of their plans, and those of what ranks of the same
    micro-batches and stages know of them alone."""
    if device.type == "cpu":
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    else:
        used = torch.accelerator.max_memory_allocated()
    figures = torch.zeros(2, dims.pp, dtype=torch.float64, device=device)
    figures[:, dims.place("pp")] = torch.tensor([used / GIB, repeated or 0.0])
    digests = torch.full((2, 1 + dims.data * dims.pp), -math.inf, dtype=torch.float64, device=device)
    place = 1 + dims.place("batch") * dims.pp + dims.place("pp")
    for column, digest in {0: step.digest, place: step.own_digest}.items():
        digests[:, column] = torch.tensor([digest, -digest])
    peaks = torch.cat([figures.flatten(), digests.flatten()])
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    peaks = peaks.cpu()
    ranks, (largest, least) = peaks[: 2 * dims.pp].tolist(), peaks[2 * dims.pp :].view(2, -1)
    if bool((largest != -least).any()):
        check_same({"the digest of its steps up to this one": step.digest})
        check_same({"how its steps up to this one are divided or recomputed": step.own_digest}, place)
    measured = {f"peak_memory_gib/pp{rank}": peak for rank, peak in enumerate(ranks[: dims.pp])}
    if repeated is not None:
        measured |= {f"repeated_layers/pp{rank}": share for rank, share in enumerate(ranks[dims.pp :])}
    return measured
