"""The base of packing policies: a class that turns the stream into one step's packs after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Interval, MinLen

from wlb_titan.arrays import Floats, Ints
from wlb_titan.cost.passes import MicroBatches, pass_times
from wlb_titan.cost.workload import CostModel
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.memory.rank import RankPeak
from wlb_titan.packing.slim.slices import WorkOf, slice_work
from wlb_titan.pipeline.graph import PassTimes
from wlb_titan.plan import Flow, MicroBatch
from wlb_titan.plugins import Family, Plugin, PluginConfig

if TYPE_CHECKING:
    from wlb_titan.job import Job

Pack = Ints
"""int64 (n, 4), columns ID, START, LENGTH, DELAY as in `MicroBatch.documents`."""

MOST_TOKENS = 1 << 27
"""Of a context window or micro-batch: beyond what any device holds, and what plans in seconds."""

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
        "slim": "wlb_titan.packing.slim.slim:Slim",
        "auto": "wlb_titan.packing.plain:Auto",
    },
)


@dataclass(frozen=True, slots=True)
class Packing:
    """The packs of one step.

    Attributes:
        packs: drafts of micro-batches, N or, where ranks share some or passes have their own, another number;
            each has at least one token to predict, and one token for each context-parallel rank.
        lost_tokens: tokens that this step's packing left out for good.
        gap: how far the largest work of a solver's packing may be above the least possible, relatively; 0
            is a proven optimum.
        assigned: numbers of each data-parallel rank's packs in the order of their index, where the policy
            decides on that. A pack that ranks share (DP-Merge) stands at the same place of each.
    """

    packs: list[MicroBatch]
    lost_tokens: int = 0
    gap: float | None = None
    assigned: list[list[int]] | None = None

    def work(self, work_of: WorkOf) -> Floats:
        """float64 (packs,), each rank's share, by a work of whole documents such as `CostModel.forward`."""
        slices = [pack.slices for pack in self.packs if pack.slices is not None]
        documents = np.concatenate([pack.documents for pack in self.packs])
        firsts = np.cumsum([0] + [len(pack.documents) for pack in self.packs[:-1]])
        works = slice_work(work_of, documents, np.concatenate(slices) if slices else None)
        return np.add.reduceat(works, firsts) / self.sharers

    @property
    def sharers(self) -> Ints:
        """int64 (packs,), data-parallel ranks that share each pack."""
        return np.array([pack.sharers for pack in self.packs])

    def pass_work(self, model: CostModel) -> tuple[Floats, Floats]:
        """float64 (packs,) each, work of forward and of backward passes; 0 where a pack has none.

        Where passes have packs of their own the backward passes compute the forward pass again.
        """
        forward, backward = (np.array([kind in pack.passes for pack in self.packs]) for kind in "FB")
        of_backward = model.backward if forward.all() else model.recomputed
        return self.work(model.forward) * forward, self.work(of_backward) * backward

    def of_rank(self, dp_rank: int) -> list[MicroBatch]:
        """The packs of a data-parallel rank, by their index."""
        assert self.assigned is not None
        return [self.packs[number] for number in self.assigned[dp_rank]]


def drafts(packs: Iterable[Pack]) -> list[MicroBatch]:
    """Micro-batches of whole documents."""
    return [MicroBatch(documents) for documents in packs]


AskRank0 = Callable[[Callable[[], Floats]], Floats]
"""Calls a function on one rank, and gives its result, float64 (n,), to all."""


def ask_locally(ask: Callable[[], Floats]) -> Floats:
    """The `AskRank0` of a planner that is alone."""
    return ask()


class PackingPolicy(Plugin, ABC):
    """Packs the documents of one step after the other.

    Args:
        stream: documents in pieces of at most the context window.

    Attributes:
        variable_length: micro-batches may differ in length; otherwise each is exactly as long as the context
            window.
        balances: packs may be given to any data-parallel rank; otherwise they stay in stream order.
        slices: long documents are computed in slices, of which a pipeline rank may have those of one document
            of the context window in flight together.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PluginConfig):
        """[wlb.packing]: how the documents of a global batch become micro-batches."""

        family = POLICIES

        cost_model: Annotated[str, MinLen(1)] = "analytic"
        """What a document's work is predicted from: `analytic` (the model's shape, the parallel degrees and
        the cluster), `simulated` (the simulator's times), `quadratic:A,B` (A d^2 + B d for a document of d
        tokens), `profile:FILE` (attention as `wlb-titan profile` measured it), or a class of your own as
        "package.module:Class"."""

        length_multiple: Annotated[int, Interval(ge=1, le=MOST_TOKENS)] = 1
        """Micro-batches are padded up to a multiple of it, and of what parallelism needs."""

        shadow: bool = False
        """Train as `plain` packs, `per_sequence` shards and the schedule orders, and plan as the configured
        policies would beside it: metrics get their balance as `shadow/...`."""

        @property
        def planning_seconds(self) -> float:
            """How much longer than other policies one step of planning may take."""
            return 0.0

        @property
        def merges(self) -> bool | Literal["auto"]:
            """Whether data-parallel ranks may share a micro-batch; `auto` where the job can."""
            return False

        @property
        def regroups(self) -> bool:
            """Whether backward passes have packs of their own, which compute layers again."""
            return False

        @property
        def rank_memory(self) -> type[RankPeak]:
            """What follows the memory of a rank that runs its packs."""
            return RankPeak

        def pass_times(self, job: Job, micro_batches: MicroBatches) -> PassTimes:
            """How long its packs take, as of the function of this name."""
            return pass_times(job, micro_batches)

        @property
        def most_in_flight(self) -> int | None:
            """Tokens of documents in slices that a pipeline rank may have in flight; None for what fits."""
            return None

        def check(self, job: Job) -> None:
            """Checks what can be checked without documents.

            Raises:
                PlanError: it cannot pack for this job.
            """

        def longest(self, job: Job) -> int:
            """Tokens that a micro-batch may have."""
            return job.window

    variable_length: ClassVar[bool]
    balances: ClassVar[bool]
    slices: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, config: Any, stream: DocumentStream, job: Job) -> None: ...

    @abstractmethod
    def next(self) -> Packing:
        """The packs of the next step."""

    def flows(self, packing: Packing, ranks: Collection[int]) -> tuple[Flow, ...] | None:
        """What the pipeline ranks run, as of `Plan.flows`; None leaves it to the schedule.

        Args:
            packing: what `next` gave last.
            ranks: the data-parallel ranks that it is asked for; the others' are empty.
        """
        return None

    @property
    def waiting(self) -> Ints:
        """int64 (n, 4), the pieces that have arrived and not yet been packed: columns ID, START, LENGTH and
        the iteration of arrival. States keep the array, so it is not written to any more."""
        return np.empty((0, 4), dtype=np.int64)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that `next` depends on besides the stream, the settings and what waits; JSON-able.

        Nothing of it is worked out from settings, degrees or devices, which may be others afterwards.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken, of which `state["waiting"]` is what waited then."""


class VariableLengthPolicy(PackingPolicy):
    """A policy whose micro-batches differ in length, up to a bound that memory sets."""

    @dataclass(kw_only=True, slots=True)
    class Config(PackingPolicy.Config):
        max_length: Annotated[int, Interval(ge=2, le=2 * MOST_TOKENS)] | None = None
        """L_max, tokens that a micro-batch may have; the bound that memory sets. "none" is the longest of
        which a whole step is predicted to fit the device, from one context window to two, and two where there
        is no device but the CPU."""

        def longest(self, job: Job) -> int:
            return self.max_length if self.max_length is not None else job.fitting.longest

    variable_length = True
    balances = True

    @staticmethod
    def bound(job: Job) -> int:
        """L_max, rounded down so that padding does not exceed it.

        Raises:
            PlanError: the longest documents would not fit.
        """
        window, longest = job.window, job.longest_micro_batch
        if longest < window:
            raise PlanError(
                f"max_length is {longest} tokens, below the context window of {window}; the longest "
                "documents would fit into no micro-batch. Set it to at least the window; twice the window is "
                "usual.",
                setting="packing.max_length",
            )
        rounded = longest // job.divisor * job.divisor
        if rounded < window:
            raise PlanError(
                f"max_length, {longest} tokens, leaves no room to pad a document of the context window, "
                f"{window} tokens, up to a multiple of {job.divisor}. Set it to at least "
                f"{-(-window // job.divisor) * job.divisor}.",
                setting="packing.max_length",
            )
        return rounded
