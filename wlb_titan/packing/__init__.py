"""Packing policies: from the stream of documents to the micro-batches of one step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from wlb_titan.cost.workload import CostModel
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.packing import thresholds
from wlb_titan.packing.fixed import Fixed, Improve
from wlb_titan.packing.plain import Plain
from wlb_titan.packing.policy import PackingPolicy
from wlb_titan.packing.solver import Solver
from wlb_titan.packing.trial import MOST_MICRO_BATCHES, imbalance_of_plain, mean_imbalance
from wlb_titan.packing.wlb import Wlb
from wlb_titan.packing.wlb_lazy import WlbLazy
from wlb_titan.settings import PackingSettings

VARIABLE_LENGTH = ("wlb", "wlb_lazy")
"""Policies whose micro-batches differ in length."""

STREAM_SETTINGS = {
    "plain": ("tail",),
    "fixed_greedy": ("window",),
    "fixed_solver": ("window",),
    "wlb": ("cost_model",),
    "wlb_lazy": ("cost_model", "tolerance", "max_delay"),
}
"""Settings by policy that decide which tokens a step gets, besides those that `stream_settings` adds."""


def create_policy(
    settings: PackingSettings,
    stream: DocumentStream,
    *,
    micro_batches: int,
    cost_model: CostModel,
    divisor: int,
    improve: Improve | None = None,
) -> PackingPolicy:
    """The policy that `settings.policy` names, reading from `stream`.

    Args:
        settings: [wlb.packing].
        stream: documents of the corpus.
        micro_batches: N, those of the whole job in one step.
        cost_model: W_a + W_l.
        divisor: micro-batches will be padded up to a multiple of it.
        improve: the solver of `fixed_solver`; None is a `Solver` of its own.

    Raises:
        PlanError: a setting is wrong, or does not fit the window.
    """
    if settings.policy == "plain":
        return Plain(stream, micro_batches=micro_batches, tail=settings.tail)
    if settings.policy == "fixed_greedy":
        return Fixed(stream, micro_batches=micro_batches, window=settings.window)
    if settings.policy == "fixed_solver":
        improve = improve or Solver(settings.time_limit, settings.gap)
        return Fixed(stream, micro_batches=micro_batches, window=settings.window, improve=improve)
    max_length = _max_length(settings, stream.window, divisor)
    if settings.policy == "wlb":
        wlb = partial(
            Wlb,
            cost_model=cost_model,
            thresholds=_thresholds(settings, stream, micro_batches, cost_model, max_length),
            max_length=max_length,
        )
        if settings.thresholds == "auto":
            _warn_if_queues_lose(wlb, stream, micro_batches, cost_model)
        return wlb(stream, micro_batches=micro_batches)
    if settings.policy == "wlb_lazy":
        return WlbLazy(
            stream,
            micro_batches=micro_batches,
            cost_model=cost_model,
            max_length=max_length,
            tolerance=settings.tolerance,
            max_delay=settings.max_delay,
            limit=imbalance_of_plain(stream, micro_batches, cost_model),
        )
    raise PlanError(f"There is no packing policy {settings.policy!r}.", setting="packing.policy")


def stream_settings(settings: PackingSettings, policy: PackingPolicy) -> dict[str, Any]:
    """What of the settings decides which tokens a step gets, under this policy; a run cannot go on without.

    Those that follow from the corpus or the device where the user leaves them open are given as they came
    out.
    """
    values: dict[str, Any] = {name: getattr(settings, name) for name in STREAM_SETTINGS[settings.policy]}
    if isinstance(policy, Wlb | WlbLazy):
        values["max_length"] = policy.max_length
    if isinstance(policy, Wlb):
        values["thresholds"] = policy.thresholds
    return values


def _max_length(settings: PackingSettings, window: int, divisor: int) -> int:
    """L_max, rounded down so that padding does not exceed it."""
    wanted = 2 * window if settings.max_length is None else settings.max_length
    if wanted < window:
        raise PlanError(
            f"max_length is {wanted} tokens, below the context window of {window}; the longest documents "
            "would fit into no micro-batch. Set it to at least the window; twice the window is usual.",
            setting="packing.max_length",
        )
    rounded = wanted // divisor * divisor
    if rounded < window:
        raise PlanError(
            f"max_length, {wanted} tokens, leaves no room to pad a document of the context window, {window} "
            f"tokens, up to a multiple of {divisor}. Set it to at least {-(-window // divisor) * divisor}.",
            setting="packing.max_length",
        )
    return rounded


def _thresholds(
    settings: PackingSettings,
    stream: DocumentStream,
    micro_batches: int,
    cost_model: CostModel,
    max_length: int,
) -> list[int]:
    if settings.thresholds == "auto":
        return thresholds.tune(
            stream.mixture.sample(),
            queues=settings.queues,
            window=stream.window,
            micro_batches=micro_batches,
            max_length=max_length,
            cost_model=cost_model,
            tolerance=settings.tolerance,
        )
    thresholds.check(settings.thresholds, stream.mixture.sample(), stream.window)
    return settings.thresholds


def _warn_if_queues_lose(
    wlb: Callable[..., Wlb], stream: DocumentStream, micro_batches: int, cost_model: CostModel
) -> None:
    """Compares `wlb`, with the best thresholds found, to `plain` in a trial of both."""
    policy = wlb(stream.anew(), micro_batches=min(micro_batches, MOST_MICRO_BATCHES))
    queues = mean_imbalance(policy, cost_model)
    plain = imbalance_of_plain(stream, micro_batches, cost_model)
    if queues > plain:
        warnings.warn(
            "Queues lose on these documents: with the best thresholds found, "
            f"{', '.join(map(str, policy.thresholds))}, `wlb` has an imbalance of {queues:.3f} in a trial, "
            f"and `plain` has {plain:.3f}. Use `wlb_lazy`, or `plain`.",
            stacklevel=3,
        )
