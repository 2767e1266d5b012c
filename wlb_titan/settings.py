"""What a user can set about packing and sharding: the TOML sections [wlb.packing] and [wlb.sharding]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval, MinLen

MOST_TOKENS = 1 << 27
"""Of a context window or micro-batch: beyond what any device holds, and what plans in seconds."""


@dataclass(kw_only=True, slots=True)
class PackingSettings:
    """[wlb.packing]: how the documents of a global batch become micro-batches."""

    policy: Literal["plain", "fixed_greedy", "fixed_solver", "wlb", "wlb_lazy"] = "plain"
    """`plain` (the paper's Plain-4D): documents fill windows of exactly `training.seq_len` tokens as they
    come. `fixed_greedy` (Fixed-4D): documents of `window` global batches are packed anew into such windows,
    balancing the sum of squared lengths. `fixed_solver`: the same by a MILP solver. `wlb`: micro-batches of
    different lengths and equal work, outliers wait in queues (the paper's Algorithm 1). `wlb_lazy`: the same
    balance with less delay, an outlier waits only while the step at hand cannot be balanced with it; where
    `plain` would be balanced better, a few documents are cut, as it does."""

    tail: Literal["carry", "drop"] = "carry"
    """Of `plain`: what happens to the rest of a document that a window's end cuts. `carry` makes it the next
    window's first document, `drop` leaves it out, as in the paper, and counts the tokens lost."""

    cost_model: Annotated[str, MinLen(1)] = "analytic"
    """What a document's work is predicted from: `analytic` (the model's shape and the parallel degrees),
    `quadratic:A,B` (A d^2 + B d for a document of d tokens) or a profile, the path of a JSON file."""

    window: Annotated[int, Interval(ge=1, le=4096)] = 1
    """Of `fixed_greedy` and `fixed_solver`: global batches that are packed together. More of them balance
    better and mix the order of the documents more."""

    time_limit: Annotated[float, Interval(gt=0, le=86400)] = 10.0
    """Of `fixed_solver`: seconds that the solver may take for the documents of one window. A solver that is
    stopped by the clock finds something else the next time, so a run cannot be repeated exactly."""

    gap: Annotated[float, Interval(ge=0, lt=1)] = 0.001
    """Of `fixed_solver`: relative gap between solution and bound at which the solver stops."""

    max_length: Annotated[int, Interval(ge=2, le=2 * MOST_TOKENS)] | None = None
    """Of `wlb` and `wlb_lazy`: L_max, tokens that a micro-batch may have; the bound that memory sets. "none"
    is the longest of which a whole step is predicted to fit the device, at most two context windows, and two
    where there is no device but the CPU."""

    length_multiple: Annotated[int, Interval(ge=1, le=MOST_TOKENS)] = 1
    """Micro-batches are padded up to a multiple of it, and of what parallelism needs."""

    thresholds: Annotated[list[Annotated[int, Ge(2)]], MinLen(1)] | Literal["auto"] = "auto"
    """Of `wlb`: smallest length of the documents of each queue, L_1 < ... < L_n. `auto` tries several on a
    sample of the corpus and takes those with the best balance and delay."""

    queues: Annotated[int, Interval(ge=1, le=8)] = 2
    """Of `wlb` with `thresholds = "auto"`: number of queues."""

    tolerance: Annotated[float, Gt(0)] = 0.065
    """Of `wlb_lazy`: what balance is worth. An imbalance of 1 + tolerance weighs as much as a delay of one
    iteration for every token, half of it a quarter as much; with N micro-batches a step the tolerance is
    widened by 1 + 4.5 / N. Smaller is better balanced and waits longer."""

    max_delay: Annotated[int, Ge(0)] = 16
    """Of `wlb_lazy`: iterations after which a document is packed, whatever it does to the balance."""


@dataclass(kw_only=True, slots=True)
class ShardingSettings:
    """[wlb.sharding]: how context parallelism divides a micro-batch over its ranks."""

    policy: Literal["per_sequence", "per_document", "adaptive", "hybrid"] = "per_sequence"
    """`per_sequence`: the packed sequence is cut into 2 x CP chunks, rank i takes chunks i and 2 CP - 1 - i.
    `per_document`: the same within every document, so that all ranks do the same work. `adaptive`: for each
    micro-batch the one of these two whose slowest rank is predicted to be faster. `hybrid`: long documents
    per document, short ones whole on one rank, if that is predicted to be faster than both."""

    remainder: Literal["spread", "round_robin"] = "spread"
    """What `per_document` does with the tokens that 2 x CP equal chunks leave over: `spread` makes some
    chunks one token longer, `round_robin` deals the tokens out one by one, as in the paper."""

    profile: str = ""
    """File with the measured attention times of the device, from `wlb-titan profile`. Empty: figures derived
    from published measurements on H100 and H200."""

    gather_groups: Annotated[int, Ge(1)] = 1
    """Groups of heads in which keys and values are gathered. With more than one, a group attends while the
    next one's keys still travel, which pays where context parallelism crosses nodes. It must divide the key
    heads of a tensor-parallel rank."""
