"""The attention times that a job is predicted by: a published kernel's, a profile's or the cluster's."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

from wlb_titan.cost.attention_hopper import KERNELS, OWN, hopper
from wlb_titan.cost.attention_latency import AttentionLatency
from wlb_titan.cost.attention_profile import AttentionShape, Profile
from wlb_titan.cost.cluster import Cluster, load_cluster
from wlb_titan.errors import PlanError


def named_attention(text: str, shape: AttentionShape) -> AttentionLatency:
    """The attention of one layer by a published kernel's times or a profile's.

    Args:
        text: a kernel of `attention_hopper`, or the path of a profile.
        shape: heads and head dims of the attention.

    Raises:
        PlanError: there is no such profile, or it lacks this attention.
    """
    if text in KERNELS:
        return _hopper(shape, text)
    return Profile.load(Path(text)).latency(shape)


def configured_latency(cluster: Cluster, shape: AttentionShape, profile: str) -> AttentionLatency:
    """The attention of one layer, as [wlb.sharding] profile says or, where it is empty, the cluster.

    Raises:
        PlanError: the profile cannot be read, or lacks this attention.
    """
    if not profile:
        return cluster_latency(cluster, shape)
    try:
        return Profile.load(Path(profile)).latency(shape)
    except PlanError as error:
        raise PlanError(str(error), setting="sharding.profile") from error


def measured_cluster(cluster: Cluster, profile: str) -> Cluster:
    """The cluster at the rates of the profile that [wlb.sharding] or it names; as it is where that has none.

    Raises:
        PlanError: the profile cannot be read.
    """
    name = profile or cluster.attention_profile
    return Profile.load(Path(name)).on(cluster) if name else cluster


def cluster_latency(cluster: Cluster, shape: AttentionShape) -> AttentionLatency:
    """The attention of one layer on a GPU of a cluster.

    It is the cluster's profile, if it has one with such an attention; otherwise the figures for H100, scaled
    to the cluster's rates of attention.
    """
    if cluster.attention_profile:
        try:
            return Profile.load(Path(cluster.attention_profile)).latency(shape)
        except PlanError as error:
            warnings.warn(
                f"{error} Until then its times are those of H100, scaled to the attention rates of "
                f"{cluster.name}.",
                stacklevel=2,
            )
    derived = _hopper(shape, OWN)
    base = load_cluster("h100_roce")
    units = cluster.units / base.units
    forward = units * base.attention_flops / cluster.attention_flops
    backward = units * base.attention_backward_flops / cluster.attention_backward_flops
    derived = replace(derived, units=cluster.units)
    if forward == backward == 1:
        return derived
    return replace(
        derived,
        forward=derived.forward.slower(forward),
        backward=derived.backward.slower(backward),
        source=f"{derived.source}, scaled to {cluster.name}",
    )


def _hopper(shape: AttentionShape, kernel: str) -> AttentionLatency:
    """By the mean head dim of queries and keys, and of values."""
    dim = (shape.head_dim + (shape.v_head_dim or shape.head_dim)) / 2
    return replace(hopper(dim, shape.heads, group=shape.group, kernel=kernel), windows=shape.windows)
