"""The memory of a run on its devices: predicted before anything is built, and measured while it trains."""

from __future__ import annotations

import resource
from collections.abc import Callable

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from wlb_titan.errors import PlanError, UserError
from wlb_titan.job import Job
from wlb_titan.memory.fits import fullest, usable_share
from wlb_titan.memory.rank import GIB, Passes, RankMemory
from wlb_titan.plan import Plan
from wlb_titan.runtime.agreement import check_same
from wlb_titan.simulator.replicas import rank_memory


def planned_memory(job: Job, plan: Plan, replica: int) -> tuple[RankMemory, ...] | None:
    """The peak of each pipeline rank, with a plan's micro-batches for one data-parallel rank. None if it is
    unknown: with experts, latent attention, or a schedule whose order of passes the planner does not know."""
    return _known(job, lambda: rank_memory(job, plan, replica))


def _known(job: Job, memory: Callable[[], tuple[RankMemory, ...]]) -> tuple[RankMemory, ...] | None:
    if job.memory_unknown:
        return None
    try:
        return memory()
    except PlanError:
        return None


def check_memory(job: Job, device_bytes: int) -> None:
    """Refuses a job in which micro-batches of one context window do not fit or, if documents are sliced, a
    document of the window: all its slices are in flight when its backward pass starts."""
    if job.packing.owner.slices:
        what = f"a document of {job.window} tokens"
        ranks = _known(job, lambda: job.fitting.document(job.window))
    else:
        what = f"micro-batches of {job.window} tokens"
        windows = Passes.of([job.window] * job.replica_micro_batches, job.packing.always_shared)
        ranks = _known(job, lambda: job.fitting.peak(windows))
    if ranks is None:
        return
    most, (usable, room) = fullest(ranks), _room(job, device_bytes)
    if most.total > usable:
        raise UserError(
            f"parallelism: this cannot fit {room}; with {what} the prediction is {_one_line(most)}. Raise a "
            "degree of parallelism, save more with activation_checkpoint, or lower training.seq_len or "
            "training.local_batch_size."
        )


def check_planned_memory(job: Job, plan: Plan, replica: int, rank: int, device_bytes: int) -> None:
    """Refuses a step that is predicted not to fit."""
    ranks, (usable, room) = planned_memory(job, plan, replica), _room(job, device_bytes)
    if ranks is not None and ranks[rank].total > usable:
        raise UserError(
            f"Step {plan.iteration + 1} cannot fit {room}; the prediction is {_one_line(ranks[rank])}."
        )


def _room(job: Job, device_bytes: int) -> tuple[float, str]:
    share = usable_share(job.packing.owner.slices)
    room = f"{share:.0%} of a device's {device_bytes / GIB:.2f} GiB"
    return share * device_bytes, f"{room} (the rest is for CUDA, NCCL and fragments)"


def measured_memory(dims: ParallelDims, device: torch.device, digest: int) -> dict[str, float]:
    """The peak of each pipeline rank in GiB: of allocated memory since the last report or, on the CPU, of the
    process's resident memory. Every rank calls it; it also compares the `digest` of their plans."""
    if device.type == "cpu":
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    else:
        used = torch.accelerator.max_memory_allocated()
    peaks = torch.zeros(dims.pp + 2, dtype=torch.float64, device=device)
    peaks[-2:] = torch.tensor([digest, -digest])
    peaks[dims.place("pp")] = used / GIB
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    *found, largest, least = peaks.tolist()
    if largest != -least:
        check_same({"the digest of its steps up to this one": digest})
    return {f"peak_memory_gib/pp{rank}": peak for rank, peak in enumerate(found)}


def _one_line(rank: RankMemory) -> str:
    head, *terms = rank.explain().splitlines()
    return f"{head}: {' + '.join(' '.join(term.split()) for term in terms)}"
