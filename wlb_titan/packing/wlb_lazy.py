"""`wlb_lazy`: the balance of Algorithm 1 with less delay. Ours.

Algorithm 1 lets every outlier wait until N of its kind have come, whether or not the step at hand could have
been balanced with it. Here each step is asked what it can bear. All documents that wait or have just arrived
form one pool, longest first, and the step holds back the h longest and packs all others. The number h is the
one that makes

    held tokens / (N window)  +  ((imbalance - 1) / tolerance)^2

least. The first term is what holding back costs: by Little's law the mean delay of a token is the mean number
of tokens that wait over the number that arrive per step. The second is what the step's imbalance costs: a
small imbalance is accepted where it spares a long wait, a large one never.

Why the h longest? A step can be balanced only if its longest document's work is at most the mean, and holding
back any other document would cost delay and lower that mean. As outliers collect, the work in the pool grows
until h = 0 is best, and all of them run together, each with as many short documents as level the work: the
release of Algorithm 1, but of mixed lengths and as early as the balance allows.

The imbalance for a given h is predicted by packing the long documents alone and pouring the short ones on top
as a liquid. A lower bound, the longest document's work over the mean, is known for all h at once. They are
tried from the least bound on, until no bound is below the best cost found: mostly one or two.

When outliers run together, micro-batches without one may reach max_length before they have their share of
work, and what is still poured lifts only the others. So the level up to which short documents are poured is
chosen by the same cost; the few shortest above it wait for the next step.

Where long documents are the rule, a batch may have too few short ones to level anything. Then it may be best
to run only N neighbours in the pool, and let all others wait, shorter ones too. That is tried for every place
in the pool.

A document that has waited `max_delay` iterations is released with all shorter ones, whatever that does to the
balance, and is packed first. If max_length is at least two windows it always fits.

With N = 4 good matches are rare, and waiting for one is long; with N = 64 the law of large numbers makes
every step alike. The tolerance is therefore widened to tolerance x (1 + 4.5 / N). docs/packing.md has the
measurements behind this and the ideas that did worse.

Where work is nearly proportional to tokens (windows of a few thousand tokens, large models) `plain`, which
cuts the document at a window's end, makes nearly equal micro-batches, while whole documents leave gaps of
about half a document. So in a step that comes out worse than the mean step of `plain`, tails of documents
move from heavy micro-batches to light ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Interval
from numpy.typing import NDArray

from wlb_titan.arrays import Bools, Floats, Ints
from wlb_titan.bins import REMAINS, Bins, split
from wlb_titan.cost.workload import CostModel, workload
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.packing.arrivals import ARRIVAL, NOTHING, Arrivals, Least, Waiting, delayed
from wlb_titan.packing.plain import imbalance_of_plain
from wlb_titan.packing.policy import Packing, VariableLengthPolicy, drafts
from wlb_titan.plan import LENGTH, START

if TYPE_CHECKING:
    from wlb_titan.job import Job


PLACED = 128  # documents of at least window / 128 tokens are packed one by one, shorter ones poured
TRIALS = 24  # most values of h that are tried in a step
FORESEEN = 24  # documents of at least window / 24 tokens are placed one by one in these trials


class WlbLazy(VariableLengthPolicy):
    """Holds back as few long documents as the balance of the step at hand asks for.

    Where `plain` would be balanced better, a few documents are cut, as it does.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VariableLengthPolicy.Config):
        tolerance: Annotated[float, Interval(ge=1e-6, le=1e6)] = 0.065
        """What balance is worth. An imbalance of 1 + tolerance weighs as much as a delay of one iteration for
        every token, half of it a quarter as much; with N micro-batches a step the tolerance is widened by
        1 + 4.5 / N. Smaller is better balanced and waits longer."""

        max_delay: Annotated[int, Ge(0)] = 16
        """Iterations after which a document is packed, whatever it does to the balance."""

        level: bool | Literal["auto"] = "auto"
        """Whether documents are cut where `plain`, which cuts them, would be balanced better. `auto`: not if
        the corpus has label masks, so conversations that fit a window stay whole."""

    def __init__(self, config: Config, stream: DocumentStream, job: Job) -> None:
        self._window = stream.window
        self._arrivals = Arrivals(stream, job)
        self._micro_batches = job.micro_batches
        self._least = Least(job.micro_batches, job.degrees.context)
        self._cost_model = job.cost_model
        self._max_length = self.bound(job)
        self._tolerance = config.tolerance * (1 + 4.5 / job.micro_batches)
        self._max_delay = config.max_delay
        level = not stream.mixture.masked if config.level == "auto" else config.level
        self._limit = imbalance_of_plain(stream, job) if level else np.inf  # above it documents are cut
        self._waiting: Waiting = NOTHING
        self._left = 0  # tokens of documents that were released and did not fit

    def next(self) -> Packing:
        iteration = self._arrivals.iteration
        # Longest first; among equal ones the latest first, so that it is held back.
        pool = np.concatenate([self._arrivals.next(self._waiting, self._left), self._waiting])
        pool = pool[np.argsort(-pool[:, LENGTH], kind="stable")]
        works = workload(self._cost_model, pool[:, LENGTH])
        overdue = (iteration - pool[:, ARRIVAL] >= self._max_delay) & (pool[:, LENGTH] > 1)
        held, stop = self._choose(pool[:, LENGTH], works, overdue)

        first = held + np.argsort(~overdue[held:stop], kind="stable")  # overdue documents are packed first
        first = first[self._least.leading_first(pool[first, LENGTH])]
        placed = int(np.flatnonzero(overdue[first]).max(initial=-1)) + 1
        assigned = self._pack(pool[first, LENGTH], works[first], placed)
        packed, left = first[assigned != REMAINS], first[assigned == REMAINS]
        self._waiting = np.concatenate([pool[:held], pool[left], pool[stop:]])
        self._left = int(pool[left, LENGTH].sum())
        assigned = self._least.topped_up(assigned[assigned != REMAINS], pool[packed, LENGTH])
        documents, assigned = level_by_cutting(
            pool[packed],
            assigned,
            self._micro_batches,
            self._max_length,
            self._cost_model,
            self._limit,
            self._least.tokens,
        )
        return Packing(drafts(split(delayed(documents, iteration), assigned, self._micro_batches)))

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
        starts = np.arange(int(np.count_nonzero(lengths >= self._least.tokens)) - n + 1)
        if not len(starts):
            return 0, np.inf
        work, tokens = (np.concatenate([[0], np.cumsum(values)]) for values in (works, lengths))
        mean = (work[starts + n] - work[starts]) / n
        costs = self._cost(works[starts] / mean, tokens[-1] - (tokens[starts + n] - tokens[starts]))
        best = int(costs.argmin())
        return best, float(costs[best])

    def _hold(self, lengths: Ints, works: Floats, overdue: Bools) -> tuple[int, float]:
        """How many of the longest documents to hold back if all others run, and the cost of that."""
        most = self._least.filled(lengths) - self._micro_batches
        most = min(most, int(np.count_nonzero(lengths >= self._least.tokens)))
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


def _candidates(most: int, step: int) -> Ints:
    """Numbers from 0 to `most`, in steps of `step` at first, then of a tenth."""
    numbers = [0]
    while numbers[-1] < most:
        numbers.append(min(most, numbers[-1] + max(step, numbers[-1] // 10)))
    return np.array(numbers, dtype=np.int64)


ROUNDS = 4  # a tail loses attention to what precedes it, so the mean falls and one round is not enough


def level_by_cutting(
    documents: Waiting,
    assigned: Ints,
    micro_batches: int,
    max_length: int,
    cost_model: CostModel,
    limit: float,
    least: int = 2,
) -> tuple[Waiting, Ints]:
    """Cuts documents of micro-batches whose work is above `limit` times the mean, down to the mean.

    Example: works equal to lengths, micro-batches of documents [6, 4] and [3, 1] tokens, limit 1: the longest
    document of the first is cut after 3 tokens and its tail goes to the second, 7 tokens each.

    Args:
        assigned: int64 (n,), micro-batch of each document.
        max_length: L_max in tokens.
        least: tokens that a cut document keeps; with two it has one to predict.

    Returns:
        The documents, cut ones shorter, then the tails; and the micro-batch of each.
    """
    lightest = float(workload(cost_model, np.ones(1, dtype=np.int64))[0])  # least work of a token
    for _ in range(ROUNDS):
        lengths = documents[:, LENGTH]
        works = workload(cost_model, lengths)
        loads = np.bincount(assigned, works, micro_batches)
        mean = loads.mean()
        heavy = loads > limit * mean
        candidates = np.flatnonzero(heavy[assigned] & (lengths > least))
        candidates = candidates[np.lexsort((-lengths[candidates], assigned[candidates]))]
        givers, longest = np.unique(assigned[candidates], return_index=True)
        tokens = np.bincount(assigned, lengths, micro_batches)
        room = np.maximum(max_length - tokens, 0) * lightest
        takers = np.argsort(loads, kind="stable")
        wanted = np.minimum(np.maximum(mean - loads, 0), room)[takers]
        giver, taker, until = _transfers(loads[givers] - mean, wanted)
        if not len(giver):
            break
        cut = candidates[longest][giver]  # the longest document of each giver, as often as it gives
        stops = _shortened(lengths[cut], works[cut], until, cost_model, least)
        first = np.diff(giver, prepend=-1) > 0
        ends = np.where(first, lengths[cut], np.roll(stops, 1))
        tails = documents[cut]
        tails[:, START] += stops
        tails[:, LENGTH] = ends - stops
        some = tails[:, LENGTH] > 0
        documents = np.concatenate([documents, tails[some]])
        np.minimum.at(documents[:, LENGTH], cut, stops)
        assigned = np.concatenate([assigned, takers[taker[some]]])
    return documents, assigned


def _transfers(given: Floats, wanted: Floats) -> tuple[Ints, Ints, Floats]:
    """Who gives work to whom: two lines of work lie side by side, and are cut where either has an end.

    Returns:
        (transfers,) each: giver, taker, and what the giver has given after it.
    """
    give, want = np.cumsum(given), np.cumsum(wanted)
    ends = np.unique(np.concatenate([give, want]))
    ends = ends[(ends > 0) & (ends <= min(give.max(initial=0), want.max(initial=0)))]
    middles = (ends + np.concatenate([[0.0], ends])[:-1]) / 2
    # Rounding may put a tiny transfer's middle at the end of a line.
    giver = np.minimum(np.searchsorted(give, middles, side="right"), len(give) - 1)
    taker = np.minimum(np.searchsorted(want, middles, side="right"), len(want) - 1)
    return giver, taker, ends - (give - given)[giver]


def _shortened(lengths: Ints, works: Floats, less: Floats, cost_model: CostModel, least: int) -> Ints:
    """The smallest lengths, at least `least`, to which documents lose no more than `less` work."""
    low, high = np.full(len(lengths), least, dtype=np.int64), lengths.copy()
    while (low < high).any():
        middle = (low + high) // 2
        enough = works - workload(cost_model, middle) <= less
        high = np.where(enough, middle, high)
        low = np.where(enough, low, middle + 1)
    return high
