"""Advice at the start of a run: what is predicted to make it faster; nothing is changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wlb_titan.context import whole
from wlb_titan.cost.passes import MicroBatches, pass_times
from wlb_titan.job import Job
from wlb_titan.memory.peak import GIB
from wlb_titan.runtime.memory import predicted_memory

HOST_SECONDS = {"selective": 0.020, "full": 0.0134, "none": 0.0096}
"""Of launching all passes of a layer for one micro-batch, uncompiled. Selective: measured on a machine with
an H100 (Qwen3 0.6B, 2.2 s a step of 28 layers and 4 micro-batches of 8,192 tokens); the others by their share
of it in CPU time with an empty attention kernel. Compiled blocks take about half."""


def advice(job: Job, *, compiled: bool, on_gpu: bool) -> list[str]:
    """Lines for the log.

    Args:
        compiled: whether blocks are.
        on_gpu: whether kernels are launched, and the host may fall behind.
    """
    lines = [*_without_checkpointing(job)]
    if on_gpu and not compiled:
        lines += _compiled(job)
    return lines


def _without_checkpointing(job: Job) -> list[str]:
    if job.memory.checkpointing == "none" or job.packing.owner.slices:
        return []
    length = job.longest_micro_batch
    bare = replace(job, memory=replace(job.memory, checkpointing="none"))
    ranks = predicted_memory(bare, [length] * job.replica_micro_batches)
    if ranks is None:
        return []
    most = max(rank.total for rank in ranks)
    if most > bare.fitting.usable:
        return []
    return [
        f'activation_checkpoint = "none" is predicted to fit: {most / GIB:.2f} of '
        f"{job.cluster.memory / GIB:.2f} GiB. It repeats no forward pass, and takes half of the host's time."
    ]


def _compiled(job: Job) -> list[str]:
    device = device_seconds(job)
    host = HOST_SECONDS[job.memory.checkpointing]
    if device >= host:
        return []
    return [
        f"The host is predicted to be the limit: a window takes the device {1e3 * device:.1f} ms a layer, "
        f"and the host about {1e3 * host:.0f} ms (uncompiled, as measured beside an H100). compile.enable = "
        "true halves the latter."
    ]


def device_seconds(job: Job) -> float:
    """Predicted seconds of a layer's passes for a micro-batch that is one document of the window."""
    forward, backward = job.latency.seconds((whole(np.array([job.window])),))[0] / job.degrees.context
    tokens = np.array([[float(job.window)]])
    attention = np.full_like(tokens, forward), np.full_like(tokens, backward)
    times = pass_times(job, MicroBatches.imagined(job, tokens, *attention))
    passes = times.forward + times.inputs + times.weights
    return float(passes.sum()) / sum(job.layers)
