"""`slim`: long documents in slices, so that packs are many and alike and nothing waits (SlimPack, 4.1).

docs/slimpack.md ("How a step is planned") has the steps: phase 1 (`dp_merge.py`), phase 2 (`micropacks.py`),
the order of passes (`packflow.py`), what happens where a step does not fit, and how `auto` finds M.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval

from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError, warn
from wlb_titan.layers.rates import Rates
from wlb_titan.memory.rank import RankMemory
from wlb_titan.packing.arrivals import Arrivals, delayed
from wlb_titan.packing.policy import Ask, Pack, Packing, PackingPolicy, check_merging, sharings
from wlb_titan.packing.slim.asymmetric import AsymmetricPacker
from wlb_titan.packing.slim.dp_merge import Packer
from wlb_titan.packing.slim.flow import Flows, Step, in_own_order
from wlb_titan.packing.slim.micropacks import MOST_TRIED, SolvedPlacing
from wlb_titan.pipeline.schedule import SCHEDULES
from wlb_titan.plan import Flow

MORE = (1, 1.5, 2, 3, 4, 6, 8)  # how many times M MicroPacks a step may have if it does not fit with fewer
MOST_MICROPACKS = 1 << 16

NUMBERS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
"""MicroPacks to try, relative to the context windows of a data-parallel rank in a step."""

SLACKS = (0, 2, 4)
STEPS = 4  # simulated for each choice
WORSE = 1.01  # how much longer than the shortest a step may take


class Slim(PackingPolicy):
    """Packs every global batch as it arrives into `micropacks` packs for each data-parallel rank.

    Imbalance 1.01, delay 0, cut 0.0 %; a step of 32 packs on 4 pipeline ranks is planned in 12 ms.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PackingPolicy.Config):
        micropacks: Annotated[int, Interval(ge=1, le=MOST_MICROPACKS)] | Literal["auto"] = "auto"
        """MicroPacks of a data-parallel rank in a step. More MicroPacks are shorter and leave a smaller
        bubble. `auto` tries several on the first documents and takes the fewest that are predicted to come
        within 1 % of the shortest step."""

        slack: Annotated[int, Interval(ge=0, le=MOST_MICROPACKS)] | Literal["auto"] = "auto"
        """MicroPacks that a pipeline rank may have in flight beyond what 1F1B needs: uneven stages then wait
        less for each other. `auto` tries some with each number of MicroPacks."""

        tokens_in_flight: Annotated[int, Ge(1)] | None = None
        """Most tokens that a pipeline rank of the mean data-parallel rank may have in flight, whatever
        `slack` says; a whole document is always allowed. "none" is as many as are predicted to fit the
        device's memory."""

        dp_merge: bool | Literal["auto"] = "auto"
        """Whether several data-parallel ranks share a document of more work than one of them should have in a
        step, as context parallelism does. `auto` shares in the steps that are predicted to get shorter,
        "true" in all that have such a document. Not with `ulysses`."""

        solver: Literal["greedy", "milp"] = "greedy"
        """How short documents are placed beside slices: longest processing time first, or HiGHS, which is
        seldom more than 1 % better and takes up to `time_limit`."""

        time_limit: Annotated[float, Interval(gt=0, le=86400)] = 1.0
        """Seconds that the solver may take for a step. A solver stopped by the clock may find another
        solution the next time, so a run cannot be repeated exactly."""

        gap: Annotated[float, Interval(ge=0, lt=1)] = 0.001
        """Relative gap between solution and bound at which the solver stops."""

        asymmetric: bool = False
        """Whether backward passes have their own MicroPacks, of equal backward work. They compute layers
        again in place of full activation checkpointing, which must be set. Useful only in a pipeline that
        needs full checkpointing anyway; selective is faster where it fits."""

        @property
        def planning_seconds(self) -> float:
            return self.time_limit if self.solver == "milp" else 0.0

        @property
        def merges(self) -> bool | Literal["auto"]:
            return False if self.asymmetric else self.dp_merge

        @property
        def regroups(self) -> bool:
            return self.asymmetric

        def check(self, rates: Rates) -> None:
            pipeline = rates.shape
            if pipeline.ranks > 1 and not SCHEDULES[pipeline.schedule].flows:
                flowing = " and ".join(name for name, schedule in SCHEDULES.items() if schedule.flows)
                raise PlanError(
                    f"Slices need the pipeline schedule {flowing}: under {pipeline.schedule} a document's "
                    "backward passes would not run from its end to its start. Set pipeline_parallel_schedule "
                    "to one of those, or choose another policy.",
                    setting="parallelism.pipeline_parallel_schedule",
                )
            if self.micropacks != "auto" and self.micropacks < pipeline.stages:
                raise PlanError(
                    f"{self.micropacks} MicroPacks are fewer than the {pipeline.stages} pipeline stages, "
                    "some of which would never be busy at the same time. Set it to at least "
                    f'{pipeline.stages}, or to "auto".',
                    setting="packing.micropacks",
                )
            if self.asymmetric and (pipeline.ranks == 1 or not rates.memory.recompute.repeats_all):
                raise PlanError(
                    "The asymmetric partition gives backward passes their own MicroPacks, which shrinks a "
                    "pipeline's bubble and computes the forward pass again. It pays only where a pipeline "
                    f"needs full checkpointing anyway, and here there are {pipeline.ranks} pipeline ranks "
                    f"and {rates.memory.checkpointing} checkpointing: set "
                    "parallelism.pipeline_parallel_degree to at least 2 and activation_checkpoint.class to "
                    '"FullAC", or leave asymmetric out.',
                    setting="packing.asymmetric",
                )
            if self.asymmetric and (self.solver != "greedy" or self.dp_merge is True):
                raise PlanError(
                    "The asymmetric partition puts the documents of a rank into one sequence, where there is "
                    "nothing to solve, and ranks share no packs. Leave solver and dp_merge out, or "
                    "asymmetric.",
                    setting="packing.asymmetric",
                )
            check_merging(rates, self, "packing.dp_merge")

    candidate = False  # the simulator knows little of what short passes lose in kernels
    variable_length = True
    balances = False
    slices = True

    def __init__(self, config: Config, stream: DocumentStream, ask: Ask) -> None:
        self._config, self._ask = config, ask
        self._arrivals = Arrivals(stream, ask)
        rates, limit = ask.fitting.rates, config.tokens_in_flight
        if limit is None and rates.memory_known:
            limit = ask.fitting.most_in_flight
        self._flows = Flows(ask, sharings(rates, config), limit)
        if config.asymmetric:
            self._packer: Packer = AsymmetricPacker(ask, stream.window, self._flows)
        else:
            always = config.dp_merge is True
            self._packer = Packer(ask, stream.window, self._flows, always_merges=always)
        self._warned = False
        self.micropacks, self.slack = self._settle(stream)
        self._solver: SolvedPlacing | None = None
        if config.solver == "milp":
            placings = ask.replicas * MOST_TRIED
            self._solver = SolvedPlacing(config.time_limit, config.gap, placings, ask.on_one_rank)
            self._packer.place = self._solver

    def next(self) -> Packing:
        if self._solver is not None:
            self._solver.start_step()
        step, flow = self._fitting(_batch(self._arrivals))
        self._latest = step.orders, flow
        return step.packing if self._solver is None else replace(step.packing, gap=self._solver.gap)

    def _fitting(self, batch: Pack) -> tuple[Step, Flow]:
        """The packs of a step: M on each rank; more, the fewest that fit memory or those that need least, if
        M do not fit; fewer if the documents have too few tokens. And the order of their passes."""
        least: tuple[RankMemory, Step, Flow] | None = None
        for count in dict.fromkeys(round(self.micropacks * times) for times in MORE):
            try:
                packing = (self._packer.packed if least else self._packer.at_most)(batch, count)
            except PlanError:
                break  # the documents have too few tokens
            step = Step.of(packing, *packing.pass_work(self._ask.cost_model))
            flow = self._flows.of(step, self.slack).flow
            peak = self._flows.peak(step, flow)
            if peak is None or peak.total <= self._ask.fitting.usable:
                return step, flow
            if least is None or peak.total < least[0].total:
                least = peak, step, flow
        assert least is not None
        self._warn(least[0])
        return least[1:]

    def _warn(self, peak: RankMemory) -> None:
        if not self._warned:
            warn(
                f"Step {self._arrivals.iteration} is predicted not to fit {self._ask.fitting.room}, with "
                f"{self.micropacks} MicroPacks a rank or with more, and runs with the number that needs "
                f"least. Later steps may not fit either; this warning appears once.\n{peak.explain()}\n"
                "If memory runs out, raise a degree of parallelism, save more with activation checkpointing, "
                "or shorten the context window."
            )
        self._warned = True

    def flows(self, packing: Packing, ranks: Collection[int]) -> tuple[Flow, ...]:
        orders, flow = self._latest
        return tuple(in_own_order(flow, order) if rank in ranks else () for rank, order in enumerate(orders))

    def state_dict(self) -> dict[str, Any]:
        return self._arrivals.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._arrivals.load_state_dict(state)

    def _settle(self, stream: DocumentStream) -> tuple[int, int]:
        """MicroPacks and slack. Where they are `auto`, the least packs, and then slack, with which the first
        steps fit and take at most `WORSE` times as long as with the best that fit, what layers have to repeat
        included; if none fit, most packs and least slack."""
        number, slack = self._config.micropacks, self._config.slack
        windows, stages = self._ask.micro_batches // self._ask.replicas, self._ask.fitting.rates.shape.stages
        fewest = max(windows, stages)
        some = sorted({max(fewest, round(windows * factor)) for factor in NUMBERS})
        numbers = some if number == "auto" else [number]
        slacks = SLACKS if slack == "auto" else (slack,)
        if len(numbers) == len(slacks) == 1:
            return numbers[0], slacks[0]
        arrivals, flows = Arrivals(stream.from_start(), self._ask), self._flows
        batches = [_batch(arrivals) for _ in range(STEPS)]
        tried: dict[int, list[Step]] = {}
        for count in numbers:
            pack = self._packer.packed if tried else self._packer.at_most
            try:
                tried[count] = [flows.timed(pack(batch, count)) for batch in batches]
            except PlanError:  # the documents have too few tokens
                break
        seconds = {
            (count, slack): flows.seconds(steps, slack) for count, steps in tried.items() for slack in slacks
        }

        @cache
        def fitting(choice: tuple[int, int]) -> float:
            """Seconds of the steps with what layers repeat so that they fit; infinity if they never do."""
            (count, slack), usable = choice, self._ask.fitting.usable
            ordered = [(step, flows.of(step, slack).flow) for step in tried[count]]
            peaks = (flows.peak(step, flow) for step, flow in ordered)
            if any(peak is not None and peak.total > usable for peak in peaks):
                return inf
            return flows.seconds([flows.repeating(step, flow) for step, flow in ordered], slack)

        best = inf
        for choice in sorted(seconds, key=seconds.__getitem__):
            if seconds[choice] >= best:
                break
            best = min(best, fitting(choice))
        if best == inf:
            return max(seconds, key=lambda choice: (choice[0], -choice[1]))
        most = WORSE * best
        return next(choice for choice in seconds if seconds[choice] <= most and fitting(choice) <= most)


def _batch(arrivals: Arrivals) -> Pack:
    iteration = arrivals.iteration
    return delayed(arrivals.next(), iteration)
