"""The base of packing policies: classes that turn the stream of documents into the packs of each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Interval, MinLen

from wlb_titan.arrays import Floats, Ints
from wlb_titan.cost.workload import CostModel
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.layers.rates import Rates
from wlb_titan.memory.fits import Fitting
from wlb_titan.packing.slices import WorkOf, slice_work
from wlb_titan.plan import Flow, MicroBatch
from wlb_titan.plugins import Family, Plugin, PluginConfig

Pack = Ints
"""int64 (n, 4), columns ID, START, LENGTH, DELAY as in `MicroBatch.documents`."""

MOST_TOKENS = 1 << 27
"""Longest context window that a setting may ask for: beyond any device, and still planned in seconds."""

POLICIES = Family(
    kind="packing policy",
    key="policy",
    group="wlb_titan.packing",
    base="wlb_titan.packing.policy:PackingPolicy",
    shipped={
        "plain": "wlb_titan.packing.plain:Plain",
        "fixed_greedy": "wlb_titan.packing.fixed:FixedGreedy",
        "fixed_solver": "wlb_titan.packing.fixed:FixedSolver",
        "wlb": "wlb_titan.packing.wlb:Wlb",
        "wlb_lazy": "wlb_titan.packing.wlb_lazy:WlbLazy",
        "dealt": "wlb_titan.packing.dealt:Dealt",
        "slim": "wlb_titan.packing.slim.slim:Slim",
        "auto": "wlb_titan.packing.plain:Auto",
    },
)


@dataclass(frozen=True, slots=True)
class Packing:
    """The packs of one step."""

    packs: list[MicroBatch]
    """Drafts: N of them, or another number where ranks share some or backward passes have their own. Each has
    a token to predict, and a token for each context-parallel rank."""

    lost_tokens: int = 0
    gap: float | None = None  # as of `Plan`
    assigned: list[list[int]] | None = None
    """Numbers of each data-parallel rank's packs, in order; None leaves that to the planner. A pack that
    ranks share (DP-Merge) has the same place on all of them."""

    def work(self, work_of: WorkOf) -> Floats:
        """float64 (packs,), or (2, packs) of two passes: each rank's share of the work, which `work_of` gives
        for whole documents."""
        slices = [pack.slices for pack in self.packs if pack.slices is not None]
        documents = np.concatenate([pack.documents for pack in self.packs])
        firsts = np.cumsum([0] + [len(pack.documents) for pack in self.packs[:-1]])
        works = slice_work(work_of, documents, np.concatenate(slices) if slices else None)
        return np.asarray(np.add.reduceat(works, firsts, axis=-1) / self.sharers)

    @property
    def sharers(self) -> Ints:
        return np.array([pack.sharers for pack in self.packs])

    def pass_work(self, model: CostModel) -> tuple[Floats, Floats]:
        """float64 (packs,) each, work of forward and of backward passes; 0 where a pack has none."""
        forward, backward = (np.array([kind in pack.passes for pack in self.packs]) for kind in "FB")
        if forward.all():
            works = self.work(model.passes)
            return works[0], works[1]
        # Backward passes with packs of their own compute the forward pass again.
        return self.work(model.forward) * forward, self.work(model.recomputed) * backward

    def of_rank(self, dp_rank: int) -> list[MicroBatch]:
        assert self.assigned is not None
        return [self.packs[number] for number in self.assigned[dp_rank]]


def drafts(packs: Iterable[Pack]) -> list[MicroBatch]:
    return [MicroBatch(documents) for documents in packs]


AskRank0 = Callable[[Callable[[], Any]], Any]
"""Calls a function on one rank, and gives its result to all."""


def ask_locally(ask: Callable[[], Any]) -> Any:
    """The `AskRank0` of a planner without other ranks."""
    return ask()


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is asked of a packing policy, besides its settings and the stream of documents."""

    micro_batches: int  # N, of all data-parallel ranks in a step
    replicas: int  # data-parallel ranks
    context: int  # context-parallel ranks, for each of which a micro-batch has a token
    divisor: int  # tokens of a micro-batch are padded to a multiple of it
    cost_model: CostModel
    longest: int  # most tokens of a micro-batch
    on_one_rank: AskRank0
    fitting: Fitting  # for policies that predict their steps

    if not TYPE_CHECKING:  # where a name that is not there is an error anyway

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            has = ", ".join(field.name for field in fields(self))
            raise PlanError(
                f"A packing policy is given no job and no {name!r}, but what is asked of it: {has}. "
                "docs/extending.md says what each was of the job."
            )

    def sample(self, most: int) -> Ask:
        """The same of at most so many micro-batches where possible, equally many for each data-parallel rank:
        of fewer ranks, then of fewer micro-batches."""
        replicas, each = self.replicas, self.micro_batches // self.replicas
        while replicas % 2 == 0 and replicas * each > most:
            replicas //= 2
        few = replicas * min(each, max(most // replicas, 1))
        return replace(self, micro_batches=few, replicas=replicas)


class PackingPolicy(Plugin, ABC):
    """Packs the documents of one step after the other."""

    @dataclass(kw_only=True, slots=True)
    class Config(PluginConfig):
        """[wlb.packing]: how the documents of a global batch become micro-batches."""

        family = POLICIES

        cost_model: Annotated[str, MinLen(1)] = "simulated"
        """How a document's work is predicted: `simulated` (the simulator's times of this job's passes, by the
        profile of [wlb.context] if there is one), `quadratic:A,B` (A d^2 + B d for a document of d tokens),
        or a class of your own as "package.module:Class"."""

        @property
        def planning_seconds(self) -> float:
            """How much longer planning a step may take than under other policies."""
            return 0.0

        @property
        def merges(self) -> bool | Literal["auto"]:
            """Whether data-parallel ranks may share a micro-batch (DP-Merge); `auto` where the job allows."""
            return False

        @property
        def always_shared(self) -> int:
            """How many data-parallel ranks share every micro-batch; 1 where that depends on its documents."""
            return 1

        @property
        def regroups(self) -> bool:
            """Whether backward passes have packs of their own, which compute layers again."""
            return False

        def check(self, rates: Rates) -> None:
            """Raises PlanError if it cannot pack for a job of these rates, whatever the documents."""

        def longest(self, fitting: Fitting) -> int:
            """Most tokens of a micro-batch."""
            return fitting.rates.window

    variable_length: ClassVar[bool]
    """Micro-batches may differ in length; otherwise each is exactly as long as the context window."""

    balances: ClassVar[bool]
    """Packs may go to any data-parallel rank; otherwise they stay in stream order."""

    endless: ClassVar[bool] = True
    """Goes on reading the stream, which then must have a document for each micro-batch of a step."""

    slices: ClassVar[bool] = False
    """Long documents are computed in slices, all of which a pipeline rank may have in flight together."""

    @abstractmethod
    def __init__(self, config: Any, stream: DocumentStream, ask: Ask) -> None: ...

    @abstractmethod
    def next(self) -> Packing:
        """The packs of the next step."""

    def flows(self, packing: Packing, ranks: Collection[int]) -> tuple[Flow, ...] | None:
        """`Plan.flows` of the packing that `next` gave last, for these data-parallel ranks; None leaves the
        order to the pipeline schedule."""
        return None

    @property
    def waiting(self) -> Ints:
        """int64 (n, 4), the pieces that have arrived and are not packed yet: columns ID, START, LENGTH and
        the iteration of arrival. Saved states share the array, so it must not be written to later."""
        return np.empty((0, 4), dtype=np.int64)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that `next` depends on besides the stream, the settings and `waiting`; JSON-able.

        Nothing that follows from settings, degrees or devices, as a run may continue with others.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken; `state["waiting"]` is `waiting` as it was then."""


def sharings(rates: Rates, packing: PackingPolicy.Config) -> dict[int, Rates]:
    """`Rates.shared` for 1, 2, 4, ... data-parallel ranks, as far as the policy lets them share a micro-batch
    and the strategy can divide it; only the rates themselves, as 1, where none are shared."""
    result, always = {1: rates}, packing.always_shared
    if not packing.merges or (rates.strategy is not None and not rates.strategy.merges):
        return result
    if rates.degrees.own_data > 1:
        if packing.merges is True:
            raise PlanError(
                f"Data-parallel ranks of {rates.degrees} have different weights and cannot share a "
                "micro-batch; choose a policy without shared micro-batches, or leave the dimension out.",
                setting="wlb.packing",
            )
        return result
    for ranks in (always,) if always > 1 else group_sizes(rates.replicas):
        try:
            result[ranks] = rates.shared(ranks)
        except PlanError:  # the strategy cannot have that many ranks
            if packing.merges is True:
                raise
            break
    return result


def group_sizes(ranks: int) -> tuple[int, ...]:
    """How many ranks may be merged: the powers of two from 2 to `ranks`."""
    return tuple(2**power for power in range(1, ranks.bit_length()))


def check_merging(rates: Rates, packing: PackingPolicy.Config, setting: str) -> None:
    """Raises PlanError where data-parallel ranks cannot share, whatever the documents."""
    if packing.merges is True and rates.strategy is not None and not rates.strategy.merges:
        raise PlanError(
            f"Data-parallel ranks cannot share a micro-batch under {rates.context.name}, which exchanges "
            "tokens for heads among context-parallel ranks and would need a head for each of the ranks that "
            "share. Choose a strategy that gathers keys, as in wlb.policy = "
            f'"{packing.name}/per_document", or leave {setting} out.',
            setting=setting,
        )


class VariableLengthPolicy(PackingPolicy):
    """A policy whose micro-batches differ in length, up to a bound that memory sets."""

    @dataclass(kw_only=True, slots=True)
    class Config(PackingPolicy.Config):
        max_length: Annotated[int, Interval(ge=2, le=2 * MOST_TOKENS)] | None = None
        """L_max, the most tokens of a micro-batch; the bound that memory sets. "none" is the longest with
        which a whole step is predicted to fit the device, from one context window to two, and two windows on
        a CPU."""

        def longest(self, fitting: Fitting) -> int:
            return self.max_length if self.max_length is not None else fitting.longest

    variable_length = True
    balances = True

    @staticmethod
    def bound(ask: Ask, window: int) -> int:
        """L_max, rounded down so that padding does not exceed it."""
        longest, divisor = ask.longest, ask.divisor
        if longest < window:
            raise PlanError(
                f"max_length is {longest} tokens, below the context window of {window}; the longest "
                "documents would fit into no micro-batch. Set it to at least the window; twice the window is "
                "usual.",
                setting="packing.max_length",
            )
        rounded = longest // divisor * divisor
        if rounded < window:
            raise PlanError(
                f"max_length, {longest} tokens, leaves no room to pad a document of the context window, "
                f"{window} tokens, up to a multiple of {divisor}. Set it to at least "
                f"{-(-window // divisor) * divisor}.",
                setting="packing.max_length",
            )
        return rounded
