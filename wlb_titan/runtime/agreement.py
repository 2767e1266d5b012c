"""What all ranks settle at the start: the checkpoint to go on from, the hardware to plan for, policies that
are `auto`, the steps of `wlb.epochs`, and how long they wait for each other.

Each rank plans by itself, and nothing would notice if two planned differently. So they compare their inputs.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.config import CommConfig
from torchtitan.tools.logging import logger

from wlb_titan.config.documents import steps_of_epochs
from wlb_titan.cost.cluster import Cluster, cluster_of_device, cluster_of_gpu
from wlb_titan.cost.workload import workload
from wlb_titan.documents import Documents
from wlb_titan.errors import UserError
from wlb_titan.job import Job
from wlb_titan.layers.passes import JobCost
from wlb_titan.memory.rank import GIB
from wlb_titan.runtime.checkpoints import Beginning, beginning
from wlb_titan.runtime.compat import process_groups
from wlb_titan.runtime.config import TrainerConfig
from wlb_titan.runtime.configured import gpu_at_hand
from wlb_titan.simulator.choice import choose

GRAPHS = 6  # of a compiled model, each forward and backward
COMPILE_SECONDS = 90  # the most seen for one of them
STEPS = 10  # that a rank may fall behind, as predicted for the longest micro-batches


def agreed_job(config: TrainerConfig, job: Job, documents: Documents) -> Job:
    """A job on the hardware of all ranks, its policies chosen; sets `training.steps` from `wlb.epochs`."""
    epochs = config.wlb.epochs
    gpus = _gathered(None if config.wlb.cluster else gpu_at_hand(config.wlb.device))
    if all(gpus):
        cluster, warning = common_cluster(gpus)
        if warning and dist.get_rank() == 0:
            logger.warning(warning)
        job = job.on(cluster)
    told = [job.accounts]  # rank 0's are everybody's
    dist.broadcast_object_list(told)
    job = replace(job, accounts=told[0])
    check_same(_facts(job, documents))
    if job.undecided or job.packing.planning_seconds:
        job = replace(job, on_one_rank=SharedAnswer())
    if job.undecided:
        choice = choose(job, documents)
        job = choice.job
        rows = [", ".join(f"{heading} {cell}" for heading, cell in row.items()) for row in choice.rows()]
        for line in [*rows, *choice.remarks()]:
            logger.info(line)
    if epochs:
        config.training.steps = steps_of_epochs(job, documents, epochs, saved_plan(config))
        check_rates(config.lr_scheduler, config.training.steps)
        logger.info(f"wlb.epochs = {epochs} takes {config.training.steps:,} steps")
    return job


class SharedAnswer:
    """One answer for all ranks: a solver stopped by its time limit finds different packings on each.

    Whoever plans asks on rank 0, and tells the others over a process group that nothing else uses: later it
    is the thread that plans ahead. All ranks make and call these in the same order.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def __call__(self, ask: Callable[[], Any]) -> Any:
        """Rank 0's `ask()` on every rank."""
        answer = [ask() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(answer, src=0, group=self._group)
        return answer[0]


def agreed_beginning(config: TrainerConfig) -> Beginning:
    """The checkpoint that rank 0 finds, for all ranks; sets `checkpoint.load_step`, warns of newer ones."""
    beginnings = [beginning(config) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(beginnings)
    (agreed,) = beginnings
    folder = Path(config.dump_folder) / config.checkpoint.folder
    for step, kind, fault in agreed.newer if dist.get_rank() == 0 else ():
        logger.warning(
            f"The run continues from step {agreed.step}: {folder / f'step-{step}'} {fault}"
            + f", and becomes {kind}-{step} beside it" * (not config.checkpoint.load_only)
            + ". If you have an intact copy, stop this run and put it there" * (kind == "broken")
        )
    if agreed.step >= 0:
        config.checkpoint = replace(config.checkpoint, load_step=agreed.step)
    return agreed


def saved_plan(config: TrainerConfig) -> dict[str, Any] | None:
    """The planner's state in the checkpoint that the run goes on from, as `agreed_beginning` found it."""
    checkpoint = config.checkpoint
    if checkpoint.load_step >= 0:
        folder = Path(config.dump_folder) / checkpoint.folder / f"step-{checkpoint.load_step}"
        has_plan = checkpoint.load_step > 0  # a seed checkpoint has weights alone
    else:
        folder = Path(checkpoint.initial_load_path or "")
        has_plan = checkpoint.initial_load_path and not checkpoint.initial_load_model_only
    if not (checkpoint.enable and has_plan) or "dataloader" in checkpoint.exclude_from_loading:
        return None
    saved = {"dataloader.planner": ""}
    dcp.load(saved, checkpoint_id=folder, no_dist=True)
    return json.loads(saved["dataloader.planner"])


def check_rates(scheduler: LRSchedulersContainer.Config, steps: int) -> None:
    """Refuses a schedule that ends before the run: torchtitan's then falls below 0, or fails."""
    total, warmup = scheduler.total_steps, scheduler.warmup_steps
    if total is not None and not warmup < total >= steps:
        raise UserError(
            f"lr_scheduler.total_steps: a schedule of {total} steps, {warmup} of warm-up, ends before a run "
            f"of {steps} steps, and rates would fall below 0. Set it to {max(steps, warmup + 1)} or more, or "
            "leave it out."
        )


def common_cluster(gpus: Sequence[tuple[str, int]]) -> tuple[Cluster, str]:
    """The cluster of the first of these GPUs (name, bytes), with the least memory of all; and a warning."""
    names, cluster = {name for name, _ in gpus}, cluster_of_gpu(gpus[0][0], min(bytes_ for _, bytes_ in gpus))
    if len(names) == 1 and cluster_of_device(*names):
        return cluster, ""
    return cluster, (
        f"No one cluster that ships has {' and '.join(sorted(names))}: planned for is {cluster.name}, with "
        f"the least memory there is, {cluster.memory / GIB:.1f} GiB. Name the hardware with [wlb] cluster."
    )


def check_same(facts: Mapping[str, Any], group: int = 0) -> None:
    """Refuses values that differ between ranks that name the same group. Every rank takes part."""
    ranks = _gathered((group, socket.gethostname(), facts))
    firsts = {ranks[rank][0]: rank for rank in reversed(range(len(ranks)))}
    different = [rank for rank, (own, _, values) in enumerate(ranks) if values != ranks[firsts[own]][2]]
    if not different:
        return
    own, host, values = ranks[different[0]]
    _, first_host, first = ranks[firsts[own]]
    different = [rank for rank in different if ranks[rank][0] == own]
    both = [(key, values.get(key), first.get(key)) for key in first | values]
    what = "; ".join(f"{key} is {value}, not {other}" for key, value, other in both if value != other)
    more = ", ..." * (len(different) > 8)
    raise UserError(
        f"Rank {', '.join(map(str, different[:8]))}{more} (host {host}) would not train what rank "
        f"{firsts[own]} (host {first_host}) does: {what}. Each rank plans by itself, so all need the same "
        "configuration, corpus, profiles and packages, and no policy may plan by rank."
    )


def _facts(job: Job, documents: Documents) -> dict[str, str]:
    facts = {field.name: repr(getattr(job, field.name)) for field in fields(job) if field.repr}
    facts["cluster"] = repr(replace(job.cluster, attention_profile=""))  # which lies where packages do
    facts |= {"attention": repr(job.latency), "other work": repr(job.token)}
    lengths = 2 ** np.arange(job.window.bit_length())
    facts["work of documents"] = repr(workload(job.cost_model, lengths).tolist())
    auto = (policy for policy in (job.packing, job.context) if policy.owner.automatic)
    facts["auto"] = repr([policy.family.candidates for policy in auto])
    facts["corpus"] = f"{documents.fingerprint} of {len(documents.lengths):,} documents"
    facts["order of documents"] = repr((documents.seed, documents.sources))
    return facts


def _gathered(value: Any) -> list[Any]:
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, value)
    return ranks


def set_timeouts(seconds: int, without: dist.ProcessGroup | None = None) -> None:
    """Sets the timeout of this rank's process groups, of which torchtitan leaves out some."""
    for group in process_groups():
        if group is not without:
            dist.set_timeout(timedelta(seconds=seconds), group)


def timeout(config: TrainerConfig, job: Job) -> int:
    """Seconds after which a collective is given up: the user's `comm.train_timeout_seconds`, or else the
    longer of `comm.init_timeout_seconds` and ten predicted steps, with time to compile and to solve
    (docs/pipeline.md, "How long ranks wait for one another")."""
    comm = config.comm
    if comm.train_timeout_seconds != CommConfig().train_timeout_seconds:
        return comm.train_timeout_seconds
    compiling = GRAPHS * COMPILE_SECONDS if config.compile.enable else 0
    windows = job.replica_micro_batches * job.longest_micro_batch / job.window
    step = windows * float(workload(JobCost(job), np.array([job.window]))[0])
    return round(max(comm.init_timeout_seconds, STEPS * step) + compiling + job.packing.planning_seconds)
