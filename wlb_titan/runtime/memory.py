"""Whether a run fits its devices: predicted before anything is built, and measured while it trains."""

from __future__ import annotations

import resource
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from wlb_titan.errors import PlanError, UserError
from wlb_titan.job import Job
from wlb_titan.memory.peak import GIB, RankMemory


def predicted_memory(job: Job, lengths: Sequence[int]) -> tuple[RankMemory, ...] | None:
    """The peak of each pipeline rank with micro-batches of these lengths; None where it is not known.

    Not known are models with experts, and schedules whose order of passes the planner does not know.
    """
    if not job.memory_known:
        return None
    try:
        return job.peak_memory(lengths)
    except PlanError:
        return None


def check_memory(job: Job, device_bytes: int) -> None:
    """Refuses what cannot fit: a step of micro-batches that are no longer than the context window.

    Raises:
        UserError: with the arithmetic of the pipeline rank that needs most.
    """
    ranks = predicted_memory(job, [job.window] * job.replica_micro_batches)
    if ranks is None:
        return
    most = max(ranks, key=lambda rank: rank.total)
    if most.total > device_bytes:
        raise UserError(
            f"parallelism: this cannot fit: a device has {device_bytes / GIB:.2f} GiB; with micro-batches of "
            f"{job.window} tokens the prediction is {_one_line(most)}. Raise a degree of parallelism, save "
            "more with activation_checkpoint, or lower training.seq_len or training.local_batch_size."
        )


def describe_memory(job: Job) -> list[str]:
    """A line on each pipeline rank's predicted peak, with micro-batches as long as they may become."""
    length = job.longest_micro_batch
    ranks = predicted_memory(job, [length] * job.replica_micro_batches)
    if ranks is None:
        what = job.schedule if job.memory_known else "a model with experts"
        return [f"Memory of {what} is not predicted; `wlb-titan dryrun` traces it"]
    return [f"Predicted peak memory, micro-batches of {length} tokens: {_one_line(rank)}" for rank in ranks]


def measured_memory(dims: ParallelDims, device: torch.device) -> dict[str, float]:
    """GiB by pipeline rank, the most of its ranks. Call it on every rank.

    Of an accelerator what was allocated at most since the last report; of the CPU what the process has had
    resident at most since it started, the libraries included.
    """
    if device.type == "cpu":
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    else:
        used = torch.accelerator.max_memory_allocated()
    peaks = torch.zeros(dims.pp, dtype=torch.float64, device=device)
    peaks[dims.get_mesh("pp").get_local_rank() if dims.pp_enabled else 0] = used / GIB
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    return {f"peak_memory_gib/pp{rank}": peak for rank, peak in enumerate(peaks.tolist())}


def _one_line(rank: RankMemory) -> str:
    head, *terms = rank.explain().splitlines()
    return f"{head}: {' + '.join(' '.join(term.split()) for term in terms)}"
