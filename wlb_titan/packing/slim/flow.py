"""The order of a step's passes under `slim`, and the seconds and peak memory that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.layers.groups import grouped
from wlb_titan.layers.passes import Loads, repeated_seconds
from wlb_titan.layers.rates import Rates
from wlb_titan.memory.fits import fullest
from wlb_titan.memory.layer import token_bytes
from wlb_titan.memory.rank import Passes, RankMemory
from wlb_titan.packing.policy import Ask, Packing
from wlb_titan.packing.predicted import pack_sizes, pass_seconds, with_mixes
from wlb_titan.packing.slices import last_needed
from wlb_titan.pipeline.packflow import PackOrder, Packs, packflow
from wlb_titan.plan import Action, Flow, MicroBatch


class Step(NamedTuple):
    """A step's packs, what their passes wait for, and how long these take."""

    packing: Packing
    orders: Ints  # int64 (replicas, n), the packs of each data-parallel rank's backward passes, in order
    needed: Ints  # int64 (replicas, n), the forward passes that these wait for
    forward: Floats  # float64 (packs,), times in any unit
    backward: Floats

    @classmethod
    def of(cls, packing: Packing, forward: Floats, backward: Floats) -> Step:
        assert packing.assigned is not None
        dependencies = [_dependencies(packing.of_rank(rank)) for rank in range(len(packing.assigned))]
        orders, needed = map(np.array, zip(*dependencies, strict=True))
        return cls(packing, orders, needed, forward, backward)


PREDICTED = 64  # packs, shared by equally many ranks, whose times are predicted to choose settings
PREDICTED_IN_STEP = 4  # the same, for a choice in every step
LOOKED_AT = 2  # data-parallel ranks whose memory is predicted, besides the one with the longest pack


class Flows:
    """One order of forward and backward passes for all data-parallel ranks, by the slowest of them.

    FSDP's ranks meet in collectives in forward and in backward passes (in all without a pipeline, in those of
    the head with one), so they have to run the same kind of pass at the same time. Backward passes are
    numbered here in the order in which they run; which packs these are differs between ranks.
    """

    def __init__(self, ask: Ask, by_sharers: Mapping[int, Rates], limit: float | None) -> None:
        self._cost_model, self._fitting, self._rates = ask.cost_model, ask.fitting, ask.fitting.rates
        self.by_sharers = by_sharers
        self.limit = limit  # tokens in flight, on the mean data-parallel rank
        # Bytes of a shared pack's token on each rank, relative to a token of a rank's own pack: a share of
        # the activations, and all of the document's keys and values.
        kept = {sharers: token_bytes(rates).kept_in_slices for sharers, rates in by_sharers.items()}
        self._held = {sharers: bytes_ / kept[1] for sharers, bytes_ in kept.items()}

    def of(self, step: Step, slack: int) -> PackOrder:
        packing, orders, needed, forward, backward = step
        ranks = np.array(packing.assigned)
        ahead = ranks[:, : orders.shape[1]]
        back = np.take_along_axis(ranks, orders, axis=1)
        weights = np.array([self._held[sharers] for sharers in packing.sharers.tolist()])
        tokens = weights * pack_tokens(packing)
        packs = Packs(
            forward=forward[ahead].max(axis=0),
            backward=backward[back].max(axis=0),
            tokens=tokens[ahead].mean(axis=0),
            freed=tokens[back].mean(axis=0),
            needed=needed.max(axis=0).tolist(),
        )
        return packflow(packs, self._rates.shape, slack=slack, limit=self.limit)

    def timed(self, packing: Packing, predicted: int = PREDICTED) -> Step:
        """A step with predicted times.

        Dividing a pack over its ranks takes milliseconds, and a large job has thousands. So of the packs that
        equally many ranks share only `predicted` are, from the least to the most work; times of the others
        are interpolated by work.
        """
        times = dict(zip("FB", packing.pass_work(self._cost_model), strict=True))
        alike: dict[tuple[int, str], list[int]] = {}
        for number, pack in enumerate(packing.packs):
            alike.setdefault((pack.sharers, pack.passes), []).append(number)
        for (_, passes), numbers in alike.items():
            group = np.array(numbers)
            places = np.unique(np.linspace(0, len(group) - 1, predicted).round().astype(int))
            sample = group[np.argsort(times[passes[0]][group], kind="stable")[places]]
            seconds = self._seconds(packing, sample)
            for kind in passes:
                rising = np.argsort(times[kind][sample])  # np.interp needs it
                work = times[kind][sample][rising]
                times[kind][group] *= np.interp(times[kind][group], work, seconds[kind][rising] / work)
                times[kind][sample] = seconds[kind]
        return Step.of(packing, times["F"], times["B"])

    def _seconds(self, packing: Packing, packs: Ints) -> dict[str, Floats]:
        """For each kind of pass float64 (n,), seconds of these packs through all stages."""
        sized = [self._rates.sized(packing.packs[number]) for number in packs.tolist()]
        forward, inputs, weights = pass_seconds(self._rates, grouped(self._rates, self._rates.sharded(sized)))
        return {"F": forward.sum(axis=0), "B": (inputs + weights).sum(axis=0)}

    def seconds(self, steps: Sequence[Step], slack: int) -> float:
        """How long steps take together."""
        return sum(self.of(step, slack).seconds for step in steps)

    def repeating(self, step: Step, flow: Flow) -> Step:
        """A step of predicted times with those of what layers repeat so that the fullest GPUs fit."""
        assert step.packing.assigned is not None
        backward = step.backward.copy()
        for rank in _candidates(step, flow) if self._rates.mixes else ():
            numbers = step.packing.assigned[rank]
            again = step.backward[numbers] + self._repeated(step, flow, rank, step.forward[numbers])
            backward[numbers] = np.maximum(backward[numbers], again)
        return step._replace(backward=backward)

    def _repeated(self, step: Step, flow: Flow, rank: int, forward: Floats) -> Floats:
        """float64 (packs of the rank,), seconds that all their layers repeat."""
        rates = self._rates
        sized = [rates.sized(pack) for pack in step.packing.of_rank(rank)]
        tokens = np.array([pack.length for pack in sized], dtype=np.float64)
        seconds = repeated_seconds(rates, Loads.imagined(rates, tokens, *np.zeros((2, len(tokens)))))
        seconds[:, -1] = forward / rates.model.layers  # `full`, with attention
        own, ranks = in_own_order(flow, step.orders[rank]), range(rates.shape.ranks)
        mixes = [m.mix for m in with_mixes(self._fitting, sized, own, ranks, lambda: seconds)]
        return np.asarray(np.einsum("psk,skp->p", np.array(mixes), seconds))

    def peak(self, step: Step, flow: Flow) -> RankMemory | None:
        """The predicted peak of a step's fullest GPU if layers keep least; None where it is not predicted."""
        if not self._rates.memory_known:
            return None
        peaks = []
        for rank in _candidates(step, flow):
            packs = [self._rates.sized(pack) for pack in step.packing.of_rank(rank)]
            passes = Passes(pack_sizes(self._rates, packs), in_own_order(flow, step.orders[rank]))
            peaks.append(fullest(self._fitting.least.peak(passes)))
        return fullest(peaks)


def pack_tokens(packing: Packing) -> Ints:
    """int64 (packs,), tokens of documents."""
    firsts = np.cumsum([0] + [len(pack.documents) for pack in packing.packs[:-1]])
    return np.add.reduceat(np.concatenate([pack.lengths for pack in packing.packs]), firsts)


def _candidates(step: Step, flow: Flow) -> list[int]:
    """Data-parallel ranks one of which should be the fullest: those with the most tokens in flight on the
    first pipeline rank, and the one with the longest pack."""
    if len(step.orders) <= LOOKED_AT:
        return list(range(len(step.orders)))
    tokens = pack_tokens(step.packing)[np.array(step.packing.assigned)]
    freed = np.take_along_axis(tokens, step.orders, axis=1)
    changes = [tokens[:, a.place] if a.kind == "F" else -freed[:, a.place] for a in flow[0]]
    most = np.cumsum(changes, axis=0).max(axis=0)
    return list({*most.argsort()[-LOOKED_AT:].tolist(), int(freed.max(axis=1).argmax())})


def _dependencies(packs: Sequence[MicroBatch]) -> tuple[Ints, Ints]:
    """The packs of a data-parallel rank's backward passes, in order, and the forward passes they need.

    Packs of their own run as they come. Others run first in first out between documents, last in first out
    within one: packs 0, 1 and 2 with slices of a document, 3 without any, 4 and 5 with slices of another run
    backward as 2 1 0 3 5 4.
    """
    needed = last_needed(packs)
    behind = np.array([place for place, pack in enumerate(packs) if pack.passes == "B"], dtype=np.int64)
    if len(behind):
        return behind, needed
    order = np.lexsort((-np.arange(len(packs)), needed))
    return order, needed[order]


def in_own_order(flow: Flow, order: Ints) -> Flow:
    """A flow of `Flows` for one rank: the k-th backward pass is the one of the pack `order[k]`."""
    packs = order.tolist()
    return tuple(
        tuple(a if a.kind == "F" else Action("B", a.stage, packs[a.place]) for a in actions)
        for actions in flow
    )
