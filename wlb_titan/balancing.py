"""The planner for any trainer: sequences of given lengths to ranks and micro-batches, so that nobody waits.

Sequences, or groups that stay together, are dealt out by falling work, each to the micro-batch of least work
that has room; then the heaviest and the lightest micro-batch swap sequences until they are even. Ranks run
their heaviest micro-batches first, so that simultaneous ones are alike: under FSDP ranks meet at every layer
of every micro-batch. n sequences take O(n log n). The same input gives the same plan on every rank, so
nothing is communicated. Only numpy is needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats, Ints
from wlb_titan.bins import REMAINS, Bins, balanced, split
from wlb_titan.cost.workload import CostModel, workload
from wlb_titan.errors import PlanError

Cost = Callable[[Ints], Floats]
"""Work of sequences by their tokens, float64 (n,), in any unit; it grows with the tokens."""

WHOLE = (int, np.integer)
SWAPS = 1000  # at most, between a heaviest and a light micro-batch
LIGHTEST = 8  # lightest micro-batches that are tried, one after the other
LOOKED_AT = 256  # sequences of a micro-batch that are tried for a swap
ENOUGH = 1e-3  # largest over mean work, minus one, at which swapping ends


@dataclass(frozen=True)
class Assignment:
    """The sequences of each rank's micro-batches: equally many on every rank, and none empty."""

    micro_batches: list[list[list[int]]]  # numbers of sequences, by rank and micro-batch
    work: Floats  # float64 (ranks, micro-batches)
    tokens: Ints  # int64 (ranks, micro-batches)
    waiting: list[int]  # numbers of sequences that found no room, with `may_wait`

    @property
    def imbalance(self) -> float:
        """Time of the step over its time if nobody waited; ranks meet at every micro-batch."""
        return float(self.work.max(axis=0).sum() / self.work.mean(axis=0).sum())


def causal(hidden: int = 4096) -> Cost:
    """Work of a causal transformer, in tokens: d + d^2 / (12 hidden) for a sequence of d tokens.

    In a layer's forward pass a token takes 8 hidden^2 operations in the attention's matrices and 16 hidden^2
    in the feed-forward ones, and a sequence 2 hidden d^2 in attention, half of 4 hidden d^2, as it is causal.
    """
    return lambda tokens: tokens + np.square(tokens, dtype=np.float64) / (12 * hidden)


def balance(
    lengths: Sequence[int] | NDArray[Any],
    *,
    ranks: int,
    micro_batches: int | Literal["auto"] = "auto",
    tokens_per_rank: int | None = None,
    cost: Cost | CostModel | NDArray[Any] | None = None,
    groups: Sequence[Hashable] | None = None,
    prompts: Sequence[int] | NDArray[Any] | None = None,
    equal_counts: bool = False,
    may_wait: bool = False,
) -> Assignment:
    """Assigns sequences to the micro-batches of data-parallel ranks; a PlanError says why it cannot.

    Args:
        lengths: tokens of each sequence; with `prompts`, of the answers alone.
        micro_batches: of each rank; "auto" is the fewest that hold everything.
        tokens_per_rank: most tokens of a micro-batch, never exceeded; None sets no limit.
        cost: work of a sequence by its tokens, or the work itself, numbers (n,); None is `causal()`.
        groups: a label for each sequence; equal ones stay in one micro-batch, as preference pairs must.
        prompts: tokens before each answer, to which it attends. The answers of a group share their prompt,
            which is computed and counted once.
        equal_counts: every micro-batch has as many sequences (with `groups`, groups) as the others.
        may_wait: where not all fit into the `micro_batches`, the rest is left `waiting` for the next step.
            Earlier ones go first: put those that have waited before the others.
    """
    check_counts(ranks=ranks, tokens_per_rank=1 if tokens_per_rank is None else tokens_per_rank)
    units = _units(lengths, causal() if cost is None else cost, groups, prompts)
    number, total = len(units.tokens), int(units.tokens.sum())
    kind = "sequence" if groups is None else "group"
    if number < ranks:
        raise PlanError(f"{number} {kind}s cannot be shared by {ranks} ranks: each needs one.")
    most = number // ranks
    limit = total if tokens_per_rank is None else tokens_per_rank
    if (longest := int(units.tokens.max())) > limit:
        raise PlanError(
            f"A {kind} of {longest:,} tokens does not fit into tokens_per_rank, which is {limit:,}."
        )
    if micro_batches == "auto":
        alone = int((2 * units.tokens > limit).sum())  # no two of these fit together
        least = min(-(-max(-(-total // limit), alone) // ranks), most)
    elif isinstance(micro_batches, WHOLE) and 1 <= micro_batches <= most:
        least = most = micro_batches
    else:
        raise PlanError(
            f"micro_batches is {micro_batches!r}; for {number} {kind}s on {ranks} ranks it can be from 1 to "
            f'{most}, or "auto".'
        )
    if may_wait:
        if micro_batches == "auto":
            raise PlanError('With may_wait, micro_batches must be a number: with "auto" nothing waits.')
        number = _most_units(units, ranks * micro_batches, limit, equal_counts)
    first = _Units(units.tokens[:number], units.work[:number], units.members[:number])
    counts = [count for count in range(least, most + 1) if not equal_counts or number % (ranks * count) == 0]
    if not counts:
        raise PlanError(
            f"{number} {kind}s cannot be divided into {ranks} ranks x {least} to {most} micro-batches of "
            "equal counts."
        )
    bins = _fewest_bins(first, [ranks * count for count in counts], limit, equal_counts)
    if bins is None:
        raise PlanError(
            f"{total:,} tokens do not fit into {counts[-1]} micro-batches of {limit:,} tokens on {ranks} "
            "ranks. Allow more of one of the three."
        )
    _even_out(first, bins, limit, equal_counts)
    work = np.array([first.work[members].sum() for members in bins])
    tokens = np.array([first.tokens[members].sum() for members in bins])
    order = balanced(work, ranks)
    sequences = [sorted(i for unit in members for i in first.members[unit]) for members in bins]
    return Assignment(
        [[sequences[bin_] for bin_ in of_rank] for of_rank in order],
        work[order],
        tokens[order],
        sorted(i for members in units.members[number:] for i in members),
    )


class _Units(NamedTuple):
    """Sequences, or groups that stay together."""

    tokens: Ints  # int64 (n,)
    work: Floats  # float64 (n,)
    members: list[list[int]]  # sequences


def _units(
    lengths: Sequence[int] | NDArray[Any],
    cost: Cost | CostModel | NDArray[Any],
    groups: Sequence[Hashable] | None,
    prompts: Sequence[int] | NDArray[Any] | None,
) -> _Units:
    sizes = _whole_numbers("lengths", lengths, least=1)
    before = np.zeros_like(sizes) if prompts is None else _whole_numbers("prompts", prompts, least=0)
    labels = range(len(sizes)) if groups is None else groups
    for name, values in (("prompts", before), ("groups", labels)):
        if len(values) != len(sizes):
            raise PlanError(
                f"{name} has {len(values)} values for {len(sizes)} sequences; it needs one for each."
            )
    members: dict[Hashable, list[int]] = {}
    for sequence, label in enumerate(labels):
        members.setdefault(label, []).append(sequence)
    sequences = list(members.values())
    unit = np.empty_like(sizes)
    for number, group in enumerate(sequences):
        unit[group] = number
    prompt = before[[group[0] for group in sequences]]
    if (before != prompt[unit]).any():
        raise PlanError(
            "The answers of a group share their prompt, but in some groups the lengths of prompts differ."
        )
    if callable(cost) or isinstance(cost, CostModel):

        def work_of(tokens: Ints) -> Floats:
            work = workload(cost, tokens) if isinstance(cost, CostModel) else cost(tokens)
            return np.asarray(work, dtype=np.float64)

        prompt_work = np.where(prompt > 0, work_of(np.maximum(prompt, 1)), 0.0)
        work = np.bincount(unit, work_of(before + sizes) - prompt_work[unit]) + prompt_work
    else:
        given = np.asarray(cost, dtype=np.float64)
        if given.shape != sizes.shape or prompts is not None:
            raise PlanError(
                "A list of costs needs one number for each sequence; with prompts, cost must be a function."
            )
        work = np.bincount(unit, given)
    if not (np.isfinite(work).all() and (work > 0).all()):
        raise PlanError("The cost must be finite and positive for every sequence, and grow with its tokens.")
    return _Units(np.bincount(unit, sizes).astype(np.int64) + prompt, np.asarray(work, np.float64), sequences)


def check_counts(**counts: Any) -> None:
    """A PlanError for an argument that is no whole number from 1 on."""
    for name, count in counts.items():
        if not isinstance(count, WHOLE) or count < 1:
            raise PlanError(f"{name} is {count!r}; it must be a whole number, at least 1.")


def _whole_numbers(name: str, values: Sequence[int] | NDArray[Any], *, least: int) -> Ints:
    numbers = np.asarray(values)
    if numbers.ndim != 1 or not len(numbers) or not np.issubdtype(numbers.dtype, np.integer):
        raise PlanError(f"{name} must be a list of whole numbers, one for each sequence.")
    if (smallest := int(numbers.min())) < least:
        raise PlanError(
            f"{name}[{numbers.argmin()}] is {smallest} and must be at least {least}; leave it out."
        )
    return numbers.astype(np.int64)


def _most_units(units: _Units, count: int, limit: int, equal: bool) -> int:
    """How many of the first units fit into `count` bins, by bisection; one in each bin does."""

    def too_many(number: int) -> bool:
        first = _Units(units.tokens[:number], units.work[:number], [])
        return _dealt(first, count, limit, equal) is None

    step = count if equal else 1
    more = range(count + step, len(units.tokens) + 1, step)
    return count + step * bisect_left(more, True, key=too_many)


def _fewest_bins(units: _Units, counts: list[int], limit: int, equal: bool) -> list[list[int]] | None:
    """The units in the fewest bins that hold them, one of the rising `counts`, by bisection: as if more bins
    always held what fewer hold."""
    best, middle, low, high = None, 0, 0, len(counts) - 1
    while low <= high:
        if (bins := _dealt(units, counts[middle], limit, equal)) is not None:
            best, high = bins, middle - 1
        else:
            low = middle + 1
        middle = (low + high) // 2
    return best


def _dealt(units: _Units, count: int, limit: int, equal: bool) -> list[list[int]] | None:
    """The units in `count` bins of at most `limit` tokens, none empty; None if they do not fit."""
    for falling in (units.work, units.tokens):
        order = np.argsort(-falling, kind="stable")
        if equal:
            most = len(order) // count
            placed = Bins(count, most).place(np.ones_like(order), falling[order].astype(np.float64))
        else:
            placed = Bins(count, limit).place(units.tokens[order], units.work[order])
        if (placed == REMAINS).any() or len(np.unique(placed)) < count:
            continue
        bins = [bin_.tolist() for bin_ in split(order, placed, count)]
        if not equal or max(int(units.tokens[bin_].sum()) for bin_ in bins) <= limit:
            return bins
    return None


def _even_out(units: _Units, bins: list[list[int]], limit: int, equal: bool) -> None:
    """Swaps units of the heaviest and a light bin, or moves one, while that lowers the higher of the two."""
    excess = np.array([units.work[members].sum() for members in bins])
    filled = np.array([units.tokens[members].sum() for members in bins])
    mean = excess.mean()
    excess -= mean
    for _ in range(SWAPS):
        high = excess.argmax()
        if excess[high] <= ENOUGH * mean:
            return
        for low in excess.argsort()[:LIGHTEST]:
            given, taken = np.array(_spread(bins[high])), np.array(_spread(bins[low]))
            # The last column takes nothing back: a move.
            moved = units.work[given][:, None] - np.append(units.work[taken], 0)
            tokens = units.tokens[given][:, None] - np.append(units.tokens[taken], 0)
            higher = np.maximum(excess[high] - moved, excess[low] + moved)
            fits = (filled[low] + tokens <= limit) & (filled[high] - tokens <= limit)
            if equal or len(bins[high]) == 1:
                fits[:, -1] = False
            row, column = np.unravel_index(np.where(fits, higher, np.inf).argmin(), fits.shape)
            if fits[row, column] and higher[row, column] < excess[high]:
                break
        else:
            return
        _hand_over(int(given[row]), bins[high], bins[low])
        if column < len(taken):
            _hand_over(int(taken[column]), bins[low], bins[high])
        change = np.array([-1, 1])
        excess[[high, low]] += change * moved[row, column]
        filled[[high, low]] += change * tokens[row, column]


def _spread(members: list[int]) -> list[int]:
    """At most `LOOKED_AT` of a bin's units, evenly spread."""
    return members[:: -(-len(members) // LOOKED_AT)]


def _hand_over(unit: int, giver: list[int], taker: list[int]) -> None:
    giver.remove(unit)
    taker.append(unit)
