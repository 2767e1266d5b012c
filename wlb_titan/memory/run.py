"""What a pipeline rank holds from pass to pass of a run, layer by layer, whatever its layers repeat.

A rank has C chunks: stages x micro-batches, by stages. A chunk's activations are there from its forward pass
to the end of its backward pass, which frees them from the last layer to the first; layers that keep most come
last, and go backward before fuller repetitions need room. So the bytes of a pass at the layer j, counted from
the end, are what is there whatever layers keep, what the layers of all chunks in flight keep, and

    made(j) - kept(0) - ... - kept(j - 1)

as later layers keep nothing yet in a forward pass, and nothing any more in a backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property

import numpy as np

from wlb_titan.arrays import Bools, Floats, Ints
from wlb_titan.context.strategy import KeyShares
from wlb_titan.layers.rates import Rates
from wlb_titan.layers.recompute import KINDS
from wlb_titan.memory.layer import TokenBytes, added_gradient, token_bytes
from wlb_titan.memory.rank import PASSING, B, F, I, PackSize, PipelineRank, RankMemory, W
from wlb_titan.memory.slice_cache import PackSlices, cached
from wlb_titan.plan import Flow

NEVER = -1e30  # bytes at a moment that a pass does not have
ENDS, AT, ATTENTION, BEHIND = range(4)
BYTES = [field.name for field in fields(TokenBytes)]
OF_LAYER = "kept", "forward", "backward", "attention"


class RunPacks:
    """The n micro-batches of a run: what depends neither on the pipeline rank nor on the order of passes."""

    def __init__(self, rates: Rates, packs: Sequence[PackSize]) -> None:
        self.packs = packs
        self.sharers = np.array([pack.sharers for pack in packs])
        self.tokens = np.array([pack.length for pack in packs])  # of one data-parallel rank
        self.length = self.tokens * self.sharers
        numbers = len(rates.account.layers) if rates.account is not None else 1
        self.layers = np.full((len(OF_LAYER), len(packs), numbers, len(KINDS) + 1), NEVER)
        """(4, n, numbers, K + 1), bytes of a layer; the last column is for places without a layer."""
        self.layers[0, ..., -1] = 0.0
        tokens = np.empty((len(BYTES), len(packs)))
        for sharers in set(self.sharers.tolist()):
            (group,) = np.nonzero(self.sharers == sharers)
            length = self.length[group]
            several = {packs[place].keys for place in group.tolist()}
            keys = several.pop()
            if several:
                keys = KeyShares(*np.array([packs[place].keys for place in group.tolist()]).T)
            for number, (column, kind) in itertools.product(range(numbers), enumerate(KINDS)):
                token = token_bytes(rates.shared(sharers), keys, kind, number)
                for row, name in enumerate(OF_LAYER):
                    self.layers[row, group, number, column] = length * getattr(token, name)
                weights = length * token.weights + added_gradient(rates, kind, number)
                backward = self.layers[OF_LAYER.index("backward")]
                backward[group, number, column] = np.maximum(backward[group, number, column], weights)
            for row, name in enumerate(BYTES):
                tokens[row, group] = getattr(token, name)
        self.token = TokenBytes(*tokens)  # of arrays (n,), for what is the same in all layers
        self.slices = [PackSlices.of(pack.slices, pack.length * pack.sharers) for pack in packs]
        self.sliced = any(pack.slices for pack in packs)


class RunArrays:
    """A run on one pipeline rank in arrays of bytes, with axes for P passes, C chunks, K kinds of
    recomputation, and L layers of a stage, from its end.

    A pass may be fullest at M moments: with nothing made but its ends; at a layer; at attention's gradients,
    which go into the cache of slices; behind a layer, when FSDP reduces its gradients; and, last of them, in
    the loss, at the softmax and at the head's gradient.

    Args:
        flow: the order of passes; None is the schedule's.
        reduced: whether there are gradients of earlier runs.
    """

    def __init__(self, rank: PipelineRank, packs: RunPacks, flow: Flow | None, *, reduced: bool) -> None:
        n, self._rank, self._packs = len(packs.packs), rank, packs
        self._kind, self._stage, self._place = rank.actions(n, flow).T  # (P,)
        self._stage_of, self._place_of = np.divmod(np.arange(len(rank.stages) * n), n)  # (C,)
        self.own = self._stage * n + self._place  # (P,), the chunk of the pass
        self.layers = rank.layers[self._stage_of]  # (C,), how many there are
        self.free = packs.sharers[self._place_of] == 1  # (C,), whether it may have a mix
        self._backward = (self._kind == B) | (self._kind == I)
        self._passes = np.arange(len(self._kind))
        self._end = self._when((self._kind == B) | (self._kind == W))
        passes = self._passes[:, None]
        self.in_flight = (passes >= self._when(self._kind == F)) * 1.0 - (passes > self._end)
        """(P, C), 1 where the chunk's activations are there."""

        self._in_layers = 2 + (packs.sliced or rank.alone) + rank.alone  # moments without those of the loss
        shape = (len(passes), self._in_layers + 2 * rank.last, 1)
        self.terms = {term: np.zeros(len(passes)) for term in PASSING}
        """By the term, (P,), what is there whatever layers keep."""
        self._beside = {term: np.zeros(shape) for term in PASSING}  # (P, M, L), what is there at the moments
        self._beside["backward"][~self._backward, ATTENTION : self._in_layers] = NEVER
        self._beside["backward"][self._kind == W, AT] = NEVER
        self._add_ends()
        self._add_whole(reduced)
        if packs.sliced:
            self._add_slices()
        elif rank.alone:
            self._beside["backward"][:, ATTENTION] = NEVER
        self.there, self._extra = (np.asarray(sum(of.values())) for of in (self.terms, self._beside))

    def counts(self, kind: int | None = None) -> Ints:
        """int64 (C, K), layers of each kind: a micro-batch's mix, or all of the job's kind; where it may have
        a mix, all of another one, by its number in KINDS."""
        jobs = KINDS.index(self._rank.rates.memory.recompute)
        result = np.zeros((len(self.layers), len(KINDS)), dtype=np.int64)
        result[range(len(result)), np.where(self.free, jobs if kind is None else kind, jobs)] = self.layers
        for place, pack in enumerate(self._packs.packs):
            if pack.mix is not None:
                result[self._place_of == place] = pack.mix[list(self._rank.stages)]
        return result

    def bytes_of(self, counts: Ints) -> Floats:
        """(P,), at the fullest moment of each pass, with int64 (C, K), layers of each kind."""
        return np.asarray(self.there + self.parts(counts).sum(axis=0))

    def parts(self, counts: Ints, chunk: int | None = None) -> Floats:
        """(C, P), each chunk's part of `bytes_of`; of one chunk (1, P), with int64 (1, K)."""
        chunks = np.arange(len(self.layers)) if chunk is None else np.array([chunk])
        passes = self._passes if chunk is None else self._passes_of[chunk]
        layers, own = self._layers(chunks, counts), self.own[passes] - chunks[0]
        result = self.in_flight.T[chunks] * layers[0].sum(axis=-1)[:, None]
        result[own, passes] += self._made(layers[:, own], passes).max(axis=(1, 2))
        return np.asarray(result)

    def peak(self, counts: Ints) -> RankMemory:
        """Memory at the fullest moment of the run, with int64 (C, K), layers of each kind."""
        layers = self._layers(np.arange(len(counts)), counts)
        made = self._made(layers[:, self.own], self._passes)
        held = self.in_flight @ layers[0].sum(axis=-1)
        now = int((self.there + held + made.max(axis=(1, 2))).argmax())
        moment, layer = divmod(int(made[now].argmax()), made.shape[-1])
        at = now, moment, layer
        terms = {
            term: of[now] + np.broadcast_to(self._beside[term], made.shape)[at]
            for term, of in self.terms.items()
        }
        in_layer = AT <= moment < self._in_layers
        freed = layers[0, self.own[now], : in_layer * (layer + (moment == BEHIND))].sum()
        terms["activations"] += held[now] - freed
        terms["backward"] += made[at] - np.broadcast_to(self._extra, made.shape)[at] + freed
        tokens = self.in_flight[now] @ self._packs.tokens[self._place_of]
        rounded = {term: round(float(bytes_)) for term, bytes_ in terms.items()}
        return replace(self._rank.still, **rounded, tokens=round(tokens))

    @cached_property
    def kept(self) -> Floats:
        """(C, K), what a stage's mean layer keeps."""
        layers = self._packs.layers[0, :, :, :-1].swapaxes(1, 2)
        return np.concatenate([layers @ shares for shares in self._rank.shares])

    @cached_property
    def _passes_of(self) -> list[Ints]:
        """The passes of each chunk."""
        return [np.flatnonzero(self.own == chunk) for chunk in range(len(self.layers))]

    def _made(self, layers: Floats, passes: Ints) -> Floats:
        """(p, M, L), bytes that passes make less what they have freed, with (4, p, L) of their chunks."""
        kept, forward, backward, attention = layers
        freed = kept.cumsum(axis=-1) - kept
        result = np.empty((len(passes), self._extra.shape[1], kept.shape[-1]))
        result[:] = self._extra[passes]
        result[:, AT] += np.where(self._backward[passes, None], backward, forward) - freed
        if self._in_layers > ATTENTION:
            result[:, ATTENTION] += attention - freed
        if self._in_layers > BEHIND:
            result[:, BEHIND] += self._hidden[self.own[passes], None] - freed - kept
        return result

    def _layers(self, chunks: Ints, counts: Ints) -> Floats:
        """(4, chunks, L), bytes of the layers of chunks, with int64 (chunks, K): kept, and made in the
        forward pass, in the backward pass and at attention's gradients."""
        kinds = (self._rank.steps[:, None] >= counts.cumsum(axis=-1)[:, None]).sum(axis=-1)
        places, numbers = self._place_of[chunks, None], self._rank.numbers[self._stage_of[chunks]]
        result = self._packs.layers[:, places, numbers, kinds]
        if self._rank.regroups:
            kept = self._states[chunks] / np.maximum(self.layers[chunks], 1)
            result[0], result[3] = kept[:, None] * (kinds < len(KINDS)), result[2]
        return result

    def _when(self, chosen: Bools) -> Ints:
        """int64 (C,), each chunk's pass among the chosen ones, P if there is none."""
        result = np.full(len(self.layers), len(chosen))
        result[self.own[chosen]] = self._passes[chosen]
        return result

    def _add_ends(self) -> None:
        """Adds inputs, outputs of stages, gradients that wait for those of weights, and the loss."""
        rank, token, length = self._rank, self._packs.token, self._packs.length
        self._hidden = (length * token.hidden)[self._place_of]
        last = rank.last & (self._stage_of == len(rank.stages) - 1)
        first = np.array(rank.stages)[self._stage_of] == 0
        output = self._hidden + last * (length * token.hidden_gathered)[self._place_of]
        output += first * (length * token.embedded)[self._place_of]
        if rank.last:
            computing = (self._kind == (B if rank.regroups else F)) & last[self.own]
            for moment, bytes_ in zip((-2, -1), (token.loss, token.head), strict=True):
                loss = (length * bytes_)[self._place]
                self._beside["loss"][:, moment, 0] = np.where(computing, loss, NEVER)
        if rank.alone:
            freed = self._backward[:, None] * output[self.own, None]
            self._beside["activations"][:, AT : self._in_layers, 0] = -freed
        activations = self.terms["activations"]
        activations += (length * token.inputs).sum()
        if rank.regroups:  # it keeps the inputs of layers and of the head, which may have a stage of its own
            self._states = self._hidden * np.array(rank.states)[self._stage_of]
            activations += self.in_flight @ (self._states * (self.layers == 0))
            self.terms["backward"] += output[self.own] + self._hidden[self.own] * self._backward
            return
        activations += self.in_flight @ output
        if (self._kind == I).any():
            passes, waiting = self._passes[:, None], self.layers * (length * token.waiting)[self._place_of]
            activations += ((passes >= self._when(self._kind == I)) & (passes <= self._end)) @ waiting
        if rank.last and not rank.alone:
            # Inputs of what is done stay because of their losses, with the latest one's gradient.
            done = self._passes[((self._kind == B) | (self._kind == W)) & last[self.own]]
            inputs, kept = self._hidden[self.own[done]], np.zeros(len(self._kind) + 1)
            kept[done + 1] = inputs + np.diff(inputs, prepend=0.0)
            activations += kept.cumsum()[:-1]

    def _add_whole(self, reduced: bool) -> None:
        """Adds gradients, and whole weights and gradients."""
        rank, beside = self._rank, self._beside["gathered"]
        first = rank.alone & (not reduced) & (self._passes <= self._end.min())  # nothing was reduced before
        self.terms["gradients"] += rank.gradients * (reduced | (rank.alone & ~first))
        if rank.alone:
            which = 1 + 2 * first + (self._passes == self._passes[-1])
            beside = self._beside["gathered"] = np.repeat(beside, len(rank.steps), axis=2)
            beside[:, AT : self._in_layers] = rank.in_layers[np.where(self._backward, which, 0)]
        else:
            gone = self._passes[:, None] > self._end.reshape(len(rank.stages), -1).min(axis=1)
            self.terms["gathered"] += rank.in_stages[0] + gone @ rank.in_stages[1:]
            added = added_gradient(rank.rates, rank.rates.memory.recompute)
            self.terms["gathered"] += added * (self._kind == W)
        if rank.last:
            beside[:, -2:] += rank.in_loss[:, None]

    def _add_slices(self) -> None:
        """Adds the cache of slices, with what a backward pass has beside it."""
        rank, token, slices = self._rank, self._rank.token, self._packs.slices
        passes = np.stack([self._kind == F, self._stage, self._place], axis=1)
        keys, gradients, made = cached(passes, slices, rank.layers.tolist()).T
        self.terms["cache"] += keys * token.cached + gradients * token.cached_gradients
        made = made * token.cached_gradients
        beside = np.array([of.beside for of in slices])[self._place] * token.cached * (not rank.regroups)
        self._beside["backward"][:, ATTENTION, 0] += np.where((made > 0) | (beside > 0), beside, NEVER)
        # Gradients of prefixes are there from attention's gradients on.
        cache = np.repeat(self._beside["cache"], len(rank.steps), axis=2)
        cache[:, AT : self._in_layers] = rank.steps + np.array([[0], [1], [1]])[: self._in_layers - AT]
        self._beside["cache"] = cache * (made / np.maximum(rank.layers[self._stage], 1))[:, None, None]
