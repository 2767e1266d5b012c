"""The ranks that gather keys of micro-batches that data-parallel ranks share (`packing/slim/dp_merge.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import CommConfig
from torchtitan.distributed import ParallelDims

from wlb_titan.job import Job
from wlb_titan.runtime.attention.module import DocumentAttention
from wlb_titan.runtime.compat import rank_layout


def prepare_merging(
    parts: Sequence[nn.Module], job: Job, parallel_dims: ParallelDims, comm: CommConfig
) -> None:
    """Prepares a model's attention for micro-batches that data-parallel ranks share, if there may be any.

    Call it on every rank of the job.

    Args:
        job: says how many ranks may share, and by which strategy.
        comm: has the seconds after which a rank that does not answer is given up.
    """
    timeout = timedelta(seconds=max(comm.init_timeout_seconds, comm.train_timeout_seconds))
    attentions = [m for part in parts for m in part.modules() if isinstance(m, DocumentAttention)]
    for sharers, merged in job.merged.items():
        if sharers > 1 and (mesh := merged_mesh(parallel_dims, sharers, timeout)) is not None:
            for attention in attentions:
                attention.share(sharers, merged.sharding, mesh)


def merged_mesh(parallel_dims: ParallelDims, sharers: int, timeout: timedelta) -> DeviceMesh | None:
    """The ranks that share with this one: of `sharers` consecutive data-parallel ranks, the first of which is
    a multiple of so many, all context-parallel ranks; None where that would be more ranks than there are."""
    batch = parallel_dims.get_mesh("batch")
    first = batch.get_local_rank() // sharers * sharers
    if first + sharers > batch.size():
        return None
    layout = rank_layout(parallel_dims)
    others, stage, _, _, place = np.argwhere(layout == dist.get_rank())[0]
    ranks = layout[others, stage, first : first + sharers, :, place].ravel().tolist()
    group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    return DeviceMesh.from_group(group, batch.device_type)
