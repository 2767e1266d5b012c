"""`wlb_lazy`: the balance of Algorithm 1 with less delay. Ours; docs/packing.md says why, and what did worse.

All documents that wait or have just arrived form one pool, longest first. A step holds back the h longest and
packs all others, with the h that makes

    held tokens / (N window)  +  ((imbalance - 1) / tolerance)^2

least. The imbalance for a given h is predicted by packing the long documents alone and pouring the short ones
on top as a liquid. A lower bound, the longest document's work over the mean, is known for all h at once. They
are tried from the least bound on, until no bound is below the best cost found: mostly one or two.

The level up to which short documents are poured is chosen by the same cost, as micro-batches may reach
max_length before they have their share of work; the few shortest above it wait. Where a batch has too few
short documents to level anything, N neighbours in the pool may run while all others wait.

A document that has waited `max_delay` iterations is released with all shorter ones, whatever that does to the
balance, and is packed first. If max_length is at least two windows it always fits. Where `plain` is balanced
better on the first documents, and may cut them, it packs all steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Interval
from numpy.typing import NDArray

from wlb_titan.arrays import Bools, Floats, Ints
from wlb_titan.bins import REMAINS, Bins, split
from wlb_titan.cost.workload import workload
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.packing.arrivals import ARRIVAL, NOTHING, Arrivals, Waiting, delayed
from wlb_titan.packing.plain import Plain, imbalances
from wlb_titan.packing.policy import Ask, Packing, VariableLengthPolicy, drafts
from wlb_titan.plan import LENGTH

PLACED = 128  # documents of at least window / 128 tokens are packed one by one, shorter ones poured
TRIALS = 24  # most values of h that are tried in a step
FORESEEN = 24  # documents of at least window / 24 tokens are placed one by one in these trials


class WlbLazy(VariableLengthPolicy):
    """Holds back as few long documents as the balance of the step at hand asks for.

    Imbalance 1.01 to 1.02, delay 0.12 to 0.19, cut 0.0 %.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VariableLengthPolicy.Config):
        tolerance: Annotated[float, Interval(ge=1e-6, le=1e6)] = 0.065
        """What balance is worth. An imbalance of 1 + tolerance weighs as much as a delay of one iteration for
        every token, half of it a quarter as much; with N micro-batches a step the tolerance is widened by 1 +
        4.5 / N. A smaller tolerance balances better and waits longer."""

        max_delay: Annotated[int, Ge(0)] = 16
        """Iterations after which a document is packed, whatever the imbalance."""

        may_cut: bool | Literal["auto"] = "auto"
        """Whether `plain`, which cuts documents, packs where it balances better. `auto`: only if the corpus
        has no label masks, so conversations that fit a window stay whole."""

    def __init__(self, config: Config, stream: DocumentStream, ask: Ask) -> None:
        self._window = stream.window
        self._arrivals = Arrivals(stream, ask)
        self._micro_batches = ask.micro_batches
        self._ask = ask
        self._max_length = self.bound(ask, stream.window)
        self._tolerance = config.tolerance * (1 + 4.5 / ask.micro_batches)
        self._max_delay = config.max_delay
        may_cut = not stream.mixture.masked if config.may_cut == "auto" else config.may_cut
        self._stream = stream
        self._plain: Plain | None = None
        if may_cut:
            lazy, plain = imbalances(replace(config, may_cut=False), stream, ask)
            self._plain = Plain(Plain.Config(), stream, ask) if plain < lazy else None
        self._waiting: Waiting = NOTHING
        self._left = 0  # tokens of documents that were released and did not fit

    def next(self) -> Packing:
        if self._plain is not None:
            return self._plain.next()
        iteration = self._arrivals.iteration
        # Longest first; among equal ones the latest first, so that it is held back.
        pool = np.concatenate([self._arrivals.next(self._waiting, self._left), self._waiting])
        pool = pool[np.argsort(-pool[:, LENGTH], kind="stable")]
        works = workload(self._ask.cost_model, pool[:, LENGTH])
        overdue = (iteration - pool[:, ARRIVAL] >= self._max_delay) & (pool[:, LENGTH] > 1)
        held, stop = self._choose(pool[:, LENGTH], works, overdue)

        first = held + np.argsort(~overdue[held:stop], kind="stable")  # overdue documents are packed first
        first = first[self._arrivals.least.leading_first(pool[first, LENGTH])]
        placed = int(np.flatnonzero(overdue[first]).max(initial=-1)) + 1
        assigned = self._pack(pool[first, LENGTH], works[first], placed)
        packed, left = first[assigned != REMAINS], first[assigned == REMAINS]
        self._waiting = np.concatenate([pool[:held], pool[left], pool[stop:]])
        self._left = int(pool[left, LENGTH].sum())
        assigned = self._arrivals.least.topped_up(assigned[assigned != REMAINS], pool[packed, LENGTH])
        return Packing(drafts(split(delayed(pool[packed], iteration), assigned, self._micro_batches)))

    def _choose(self, lengths: Ints, works: Floats, overdue: Bools) -> tuple[int, int]:
        """Start and stop of the documents to run. Lengths descend, and those that are overdue must run."""
        hold, cost = self._hold(lengths, works, overdue)
        if not overdue.any():
            alone, cost_alone = self._alone(lengths, works)
            if cost_alone < cost:
                return alone, alone + self._micro_batches
        return hold, len(lengths)

    def _alone(self, lengths: Ints, works: Floats) -> tuple[int, float]:
        """The first of the N neighbours that are best to run without all others, and the cost of that."""
        n = self._micro_batches
        starts = np.arange(int(np.count_nonzero(lengths >= self._arrivals.least.tokens)) - n + 1)
        if not len(starts):
            return 0, np.inf
        work, tokens = (np.concatenate([[0], np.cumsum(values)]) for values in (works, lengths))
        mean = (work[starts + n] - work[starts]) / n
        costs = self._cost(works[starts] / mean, tokens[-1] - (tokens[starts + n] - tokens[starts]))
        best = int(costs.argmin())
        return best, float(costs[best])

    def _hold(self, lengths: Ints, works: Floats, overdue: Bools) -> tuple[int, float]:
        """How many of the longest documents to hold back if all others run, and the cost of that."""
        most = self._arrivals.least.filled(lengths) - self._micro_batches
        most = min(most, int(np.count_nonzero(lengths >= self._arrivals.least.tokens)))
        if overdue.any():
            most = min(most, int(overdue.argmax()))
        holds = _candidates(most, max(self._micro_batches // 64, 1))
        held = (np.cumsum(lengths) - lengths)[holds]
        mean = (works.sum() - (np.cumsum(works) - works)[holds]) / self._micro_batches
        bounds = self._cost(works[holds] / mean, held)

        foreseen = int(np.searchsorted(-lengths, -self._window // FORESEEN, side="right"))
        best, best_cost = 0, np.inf
        for candidate in np.argsort(bounds, kind="stable")[:TRIALS]:
            if bounds[candidate] >= best_cost:
                break
            hold = int(holds[candidate])
            long = slice(hold, max(hold, foreseen))
            short = slice(long.stop, None)
            bins = Bins(self._micro_batches, self._max_length)
            unplaced = bins.place(lengths[long], works[long]) == REMAINS
            waiting = held[candidate] + int(lengths[long][unplaced].sum())
            _, imbalance, left = bins.portions(float(works[short].sum()), int(lengths[short].sum()))
            cost = float(self._cost(imbalance, waiting + left).min())
            if cost < best_cost:
                best, best_cost = hold, cost
        return best, best_cost

    def _cost(self, imbalance: Floats, waiting: NDArray[Any]) -> Floats:
        """The module's cost of a step, in iterations of delay; `waiting` are tokens that wait after it."""
        excess = np.maximum(imbalance - 1, 0) / self._tolerance
        return waiting / (self._micro_batches * self._window) + excess**2

    def _pack(self, lengths: Ints, works: Floats, placed: int) -> Ints:
        """The bin of each document: the first `placed`, all long ones, and N at least, are placed one by one,
        the others, longest first, are poured."""
        long = int(np.searchsorted(-lengths[placed:], -(self._window // PLACED), side="right"))
        long = max(placed + long, self._micro_batches)
        bins = Bins(self._micro_batches, self._max_length)
        assigned = bins.place(lengths[:long], works[:long])
        ceilings, imbalance, left = bins.portions(float(works[long:].sum()), int(lengths[long:].sum()))
        # Among equal costs the last ceiling, which leaves least.
        ceiling = ceilings[::-1][self._cost(imbalance, left)[::-1].argmin()]
        return np.concatenate([assigned, bins.pour(lengths[long:], works[long:], float(ceiling))])

    @property
    def waiting(self) -> Waiting:
        return self._waiting

    def state_dict(self) -> dict[str, Any]:
        return {"arrivals": self._arrivals.state_dict(), "left": self._left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._arrivals.load_state_dict(state["arrivals"])
        self._waiting, self._left = state["waiting"], int(state["left"])
        if self._plain is not None and len(self._waiting):  # saved where `plain` was not better
            self._stream.give_back(self._waiting[:, : LENGTH + 1])
            self._waiting, self._left = NOTHING, 0


def _candidates(most: int, step: int) -> Ints:
    """Numbers from 0 to `most`, in steps of `step` at first, then of a tenth."""
    numbers = [0]
    while numbers[-1] < most:
        numbers.append(min(most, numbers[-1] + max(step, numbers[-1] // 10)))
    return np.array(numbers, dtype=np.int64)
