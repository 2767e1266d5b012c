"""The memory of a run on its devices: predicted before anything is built, and measured while it trains."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError, UserError
from wlb_titan.job import Job
from wlb_titan.memory.fits import fullest, usable_share
from wlb_titan.memory.rank import GIB, TERMS, Passes, RankMemory
from wlb_titan.plan import Plan
from wlb_titan.runtime.agreement import check_same
from wlb_titan.simulator.replicas import peak_memory, rank_memory

FIRST_STEPS = 12  # steps of slices that are planned to predict their memory
MOST_REPLICAS = 64  # data-parallel ranks whose memory is predicted in these; one takes some milliseconds


def predicted_memory(job: Job, length: int) -> tuple[RankMemory, ...] | None:
    """The peak of each pipeline rank, with micro-batches of `length` tokens. None if it is unknown: with
    experts, latent attention, or a schedule whose order of passes the planner does not know."""
    return _known(job, lambda: job.fitting.peak(Passes.of([length] * job.replica_micro_batches)))


def planned_memory(job: Job, plan: Plan, replica: int) -> tuple[RankMemory, ...] | None:
    """The peak of each pipeline rank, with a plan's micro-batches for one data-parallel rank."""
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
        ranks = predicted_memory(job, job.window)
    if ranks is None:
        return
    most, (usable, room) = fullest(ranks), _room(job, device_bytes)
    if most.total > usable:
        raise UserError(
            f"parallelism: this cannot fit {room}; with {what} the prediction is {_one_line(most)}. Raise a "
            "degree of parallelism, save more with activation_checkpoint, or lower training.seq_len or "
            "training.local_batch_size."
        )


def check_planned_memory(job: Job, plan: Plan, replica: int, rank: int, device_bytes: int) -> str | None:
    """Refuses a step that is predicted not to fit; returns the prediction in words, None if unknown."""
    ranks = planned_memory(job, plan, replica)
    if ranks is None:
        return None
    arithmetic, (usable, room) = _one_line(ranks[rank]), _room(job, device_bytes)
    if ranks[rank].total > usable:
        raise UserError(f"Step {plan.iteration + 1} cannot fit {room}; the prediction is {arithmetic}.")
    return arithmetic


def _room(job: Job, device_bytes: int) -> tuple[float, str]:
    share = usable_share(job.packing.owner.slices)
    words = (
        f"{share:.0%} of a device's {device_bytes / GIB:.2f} GiB (the rest is for CUDA, NCCL and fragments)"
    )
    return share * device_bytes, words


def describe_memory(job: Job, documents: Documents) -> list[str]:
    """A line on each pipeline rank's predicted peak, with the longest micro-batches or, if documents are
    sliced, in the largest of the first steps."""
    ranks: tuple[RankMemory, ...] | None
    if job.packing.owner.slices:
        solved = job.packing.planning_seconds > 0
        steps = 1 if solved else max(1, min(FIRST_STEPS, MOST_REPLICAS // job.degrees.data))
        ranks = None if job.memory_unknown else peak_memory(job, job.plans(documents, steps))
        most = f"the most of the first {steps} steps"
    else:
        length = job.longest_micro_batch
        ranks, most = predicted_memory(job, length), f"micro-batches of {length} tokens"
    if ranks is None:
        what = job.memory_unknown or job.schedule
        return [f"Memory of {what} is not predicted; `wlb-titan dryrun` traces it"]
    return [f"Predicted peak memory, {most}: {_in_short(rank)}" for rank in ranks]


def advise_checkpointing(job: Job) -> list[str]:
    """A line if a run without activation checkpointing is predicted to fit."""
    if job.memory.checkpointing == "none" or job.packing.owner.slices:
        return []
    bare = replace(job, memory=replace(job.memory, checkpointing="none"))
    ranks = predicted_memory(bare, job.longest_micro_batch)
    if ranks is None or (most := fullest(ranks).total) > bare.fitting.usable:
        return []
    return [
        f'activation_checkpoint = "none" is predicted to fit: {most / GIB:.2f} of '
        f"{job.cluster.memory / GIB:.2f} GiB. It repeats no forward pass, and takes half of the host's time."
    ]


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


def _in_short(rank: RankMemory) -> str:
    parts = sorted(((getattr(rank, name), name.replace("_", " ")) for name in TERMS), reverse=True)[:2]
    most = " and ".join(f"{name} {size / GIB:.2f}" for size, name in parts)
    return f"{rank.total / GIB:.2f} GiB on pipeline rank {rank.rank}, {most} of them"


def _one_line(rank: RankMemory) -> str:
    head, *terms = rank.explain().splitlines()
    return f"{head}: {' + '.join(' '.join(term.split()) for term in terms)}"
