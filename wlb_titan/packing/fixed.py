"""`fixed_greedy` and `fixed_solver`: fixed-length packing, the baseline of section 3.2 (docs/packing.md).

Each document goes to the micro-batch of least work, the sum of squared lengths, that has room. `fixed_solver`
then solves equation 1 as a mixed-integer program with HiGHS (extra `solver`). A few short documents fit
nowhere. They are left for the next packing, which reads that many tokens less from the stream; after
`PATIENCE` packings they come first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval

from wlb_titan.arrays import Floats, Ints
from wlb_titan.bins import REMAINS, Bins, split
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.packing.arrivals import ARRIVAL, NOTHING, Least, Waiting, arrived, delayed
from wlb_titan.packing.policy import Ask, Packing, PackingPolicy, drafts
from wlb_titan.plan import LENGTH

PATIENCE = 4


class FixedGreedy(PackingPolicy):
    """Packs the documents of several global batches into micro-batches of the context window (Fixed-4D).

    The packs are sorted by work and dealt out N at a time, so that the packs of one step are alike; the
    paper's Table 2 needs this. The price is that heavy steps come before light ones. Documents arrive when
    their global batches are read, so in the k-th step after that the delay is k.

    Imbalance 1.10 to 1.35, delay 0, over one global batch; 1.02 to 1.06 and 3.38 over eight. Cut as `plain`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PackingPolicy.Config):
        global_batches: Annotated[int, Interval(ge=1, le=4096)] = 1
        """Global batches that are packed together, the paper's packing window. More of them balance better
        and mix the order of the documents more."""

    variable_length = False
    balances = True

    def __init__(self, config: Config, stream: DocumentStream, ask: Ask) -> None:
        self._stream = stream
        self._micro_batches = ask.micro_batches
        self._packs = ask.micro_batches * config.global_batches
        self._least = Least(self._packs, ask.context)
        self._iteration = 0
        self._remained: Waiting = NOTHING
        self._ready: list[Waiting] = []  # the packs of the window's coming steps
        self._gap: float | None = None

    def next(self) -> Packing:
        if not self._ready:
            self._pack_window()
        n = self._micro_batches
        packs, self._ready = self._ready[:n], self._ready[n:]
        packs = [delayed(pack, self._iteration) for pack in packs]
        self._iteration += 1
        return Packing(drafts(packs), gap=self._gap)

    def _pack_window(self) -> None:
        documents = self._read()
        lengths = documents[:, LENGTH]
        overdue = self._iteration - documents[:, ARRIVAL] >= PATIENCE * self._packs // self._micro_batches
        documents = documents[np.lexsort((-lengths, ~overdue, ~self._stream.has_label(documents)))]
        documents = documents[self._least.leading_first(documents[:, LENGTH])]
        lengths = documents[:, LENGTH]
        works = lengths.astype(np.float64) ** 2
        assigned = Bins(self._packs, self._stream.window).place(lengths, works)
        fits = assigned != REMAINS
        self._remained = documents[~fits]
        documents, lengths, works = documents[fits], lengths[fits], works[fits]
        assigned = self._least.topped_up(assigned[fits], lengths)
        better, gap = self._improved(lengths, assigned)
        if self._least.topped_up(better, lengths) is better:  # equation 1 allows packs with too few tokens
            assigned, self._gap = better, gap
        packs = split(documents, assigned, self._packs)
        order = np.argsort(-np.bincount(assigned, works, self._packs), kind="stable")
        self._ready = [packs[pack] for pack in order]

    def _improved(self, lengths: Ints, assigned: Ints) -> tuple[Ints, float | None]:
        """A packing at least as good, and its gap if known."""
        return assigned, None

    def _read(self) -> Waiting:
        """The documents that remained, and as much of the stream as fills the packs."""
        window = self._stream.window
        parts, counts = [self._remained], self._least.counts(self._remained[:, LENGTH])
        budget = self._packs * window - int(self._remained[:, LENGTH].sum())
        while budget > 0 or self._least.filled_by(counts) < self._packs:
            pieces = self._stream.fill(min(window, budget) if budget > 0 else window)
            parts.append(arrived(pieces, self._iteration))
            counts += self._least.counts(pieces[:, LENGTH])
            budget -= window
        return np.concatenate(parts)

    @property
    def waiting(self) -> Waiting:
        return np.concatenate([*self._ready, self._remained])

    def state_dict(self) -> dict[str, Any]:
        packs = [len(pack) for pack in self._ready]
        return {"iteration": self._iteration, "packs": packs, "gap": self._gap}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._iteration, self._gap = int(state["iteration"]), state["gap"]
        ends = np.cumsum(state["packs"], dtype=np.int64)
        *self._ready, self._remained = np.split(state["waiting"], ends)


class FixedSolver(FixedGreedy):
    """As `fixed_greedy`, and then a MILP solver makes each packing better.

    Imbalance 1.09 to 1.29, delay 0, over one global batch; a step is planned in 142 to 246 ms.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FixedGreedy.Config):
        time_limit: Annotated[float, Interval(gt=0, le=86400)] = 10.0
        """Seconds that the solver may take for the documents of one window. A solver stopped by the clock may
        find another solution the next time, so a run cannot be repeated exactly."""

        gap: Annotated[float, Interval(ge=0, lt=1)] = 0.001
        """Relative gap between solution and bound at which the solver stops."""

        @property
        def planning_seconds(self) -> float:
            return self.time_limit

    def __init__(self, config: Config, stream: DocumentStream, ask: Ask) -> None:
        super().__init__(config, stream, ask)
        user = "The policy fixed_solver"
        self._milp = Milp(config.time_limit, config.gap, user=user, setting="wlb.policy")
        self._on_one_rank = ask.on_one_rank

    def _improved(self, lengths: Ints, assigned: Ints) -> tuple[Ints, float | None]:
        facts = lengths, assigned, self._packs, self._stream.window
        answer: tuple[Ints, float] = self._on_one_rank(lambda: solved(self._milp, *facts))
        return answer


def solved(milp: Milp, lengths: Ints, start: Ints, packs: int, window: int) -> tuple[Ints, float]:
    """Minimises the largest sum of squared lengths of packs of at most `window` tokens.

    Returns:
        The best packing found, never worse than `start`, which fits; and the relative gap between it and the
        bound that was proven.
    """
    share = lengths / window
    work = share**2
    longest = int(lengths.argmax())
    alike = np.ones(packs)
    # All packs are alike: with the longest document fixed the solver skips many mirror images.
    packing, bound = milp(
        work, share, (0 * alike, alike, alike), start=start, kept=(longest, int(start[longest]))
    )

    def largest(assigned: Ints) -> float:
        return float(np.bincount(assigned, work, packs).max())

    assigned = start
    if packing is not None:
        fits = int(np.bincount(packing, lengths, packs).max()) <= window
        if fits and largest(packing) < largest(start):
            assigned = packing
    least = max(bound, float(work.max()), float(work.sum()) / packs)
    return assigned, max(0.0, 1 - least / largest(assigned))


MOST_VARIABLES = 1 << 18
"""Pairs of a document and a bin; larger problems are not tried."""


class Milp:
    """Puts documents into bins with HiGHS, so that the highest level is as low as possible.

    The variables are z and x_ij, document i in bin j, document by document:

        minimise z   subject to   sum_j x_ij = 1,   sum_i size_i x_ij <= room_j,
                                  load_j + sum_i work_i x_ij <= width_j z

    The time limit includes building the model: a few tenths of a second with `MOST_VARIABLES`.
    """

    def __init__(self, time_limit: float, gap: float, *, user: str, setting: str) -> None:
        try:
            import highspy
        except ImportError as error:
            raise PlanError(
                f"{user} needs HiGHS. Install it with: pip install 'highspy>=1.7'", setting=setting
            ) from error
        self._highspy: Any = highspy
        self._time_limit, self._gap = time_limit, gap

    def __call__(
        self,
        work: Floats,
        size: Floats,
        bins: tuple[Floats, Floats | Ints, Floats],
        *,
        start: Ints | None,
        kept: tuple[int, int] | None = None,
    ) -> tuple[Ints | None, float]:
        """Looks for a packing.

        Args:
            work, size: float64 (documents,).
            bins: load, width and room, float64 (bins,) each; room may be infinite.
            start: a packing, int64 (documents,).
            kept: a document, and the bin that it stays in.

        Returns:
            int64 (documents,), the best packing found, if any; and a lower bound of z. The packing may
            violate a condition by the solver's tolerance.
        """
        end = time.perf_counter() + self._time_limit
        load, width, room = bins
        documents, count = len(work), len(load)
        pairs = documents * count
        if pairs > MOST_VARIABLES:
            return None, 0.0
        highs, infinity = self._highspy.Highs(), self._highspy.kHighsInf
        for option, value in {"output_flag": False, "threads": 1, "random_seed": 0}.items():
            highs.setOptionValue(option, value)
        highs.setOptionValue("mip_rel_gap", self._gap)
        columns = (1 + np.arange(pairs)).reshape(documents, count).astype(np.int32)  # 0 is z
        upper = np.ones((documents, count))
        if kept is not None:
            upper[kept[0]] = np.arange(count) == kept[1]
        highs.addVars(1, np.array([work.max() / width.max()]), np.array([infinity]))
        highs.addVars(pairs, np.zeros(pairs), upper.ravel())
        highs.changeColCost(0, 1.0)
        whole = np.full(pairs, self._highspy.HighsVarType.kInteger)
        highs.changeColsIntegrality(pairs, columns.ravel(), whole)
        starts = np.arange(documents, dtype=np.int32) * count
        ones = np.ones(documents)
        highs.addRows(documents, ones, ones, pairs, starts, columns.ravel(), np.ones(pairs))
        for j in range(count):
            column = np.ascontiguousarray(columns[:, j])
            if np.isfinite(room[j]):
                highs.addRow(-infinity, room[j], documents, column, size)
            level = np.append(work, -float(width[j]))
            highs.addRow(-infinity, -load[j], documents + 1, np.append(column, np.int32(0)), level)
        if start is not None:
            solution = self._highspy.HighsSolution()
            values = np.zeros(1 + pairs)
            values[0] = ((load + np.bincount(start, work, count)) / width).max()
            values[columns[np.arange(documents), start]] = 1.0
            solution.col_value = values.tolist()
            highs.setSolution(solution)
        if (left := end - time.perf_counter()) <= 0:
            return None, 0.0
        highs.setOptionValue("time_limit", left)
        highs.run()
        result, packed = np.array(highs.getSolution().col_value), None
        if len(result) == 1 + pairs and result.any():
            packed = result[columns].argmax(axis=1).astype(np.int64)
        return packed, float(highs.getInfo().mip_dual_bound)
