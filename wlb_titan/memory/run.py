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
from typing import TYPE_CHECKING

import numpy as np

from wlb_titan.arrays import Bools, Floats, Ints
from wlb_titan.context.strategy import KeyShares
from wlb_titan.memory.layer import TokenBytes
from wlb_titan.memory.rank import B, F, I, PackSize, PipelineRank, RankMemory, W
from wlb_titan.memory.recompute import KINDS
from wlb_titan.memory.slice_cache import PackSlices
from wlb_titan.plan import Flow

if TYPE_CHECKING:
    from wlb_titan.job import Job

NEVER = -1e30  # bytes at a moment that a pass does not have
AT, ATTENTION, BEHIND = range(3)
"""Moments in a layer: while a pass computes it; at attention's gradients, which go into the cache of slices;
and, without a pipeline, behind its backward pass, when its gradients are reduced."""
BYTES = [field.name for field in fields(TokenBytes)]
OF_LAYER = "kept", "forward", "backward", "attention"


class RunPacks:
    """The n micro-batches of a run: what depends neither on the pipeline rank nor on the order of passes."""

    def __init__(self, job: Job, packs: Sequence[PackSize]) -> None:
        self.job, self.packs = job, packs
        self.sharers = np.array([pack.sharers for pack in packs])
        self.tokens = np.array([pack.length for pack in packs])  # of one data-parallel rank
        self.length = self.tokens * self.sharers
        numbers = len(job.account.layers) if job.account is not None else 1
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
                token = job.token_bytes_of(sharers, keys, kind, number)
                for row, name in enumerate(OF_LAYER):
                    self.layers[row, group, number, column] = length * getattr(token, name)
            for row, name in enumerate(BYTES):
                tokens[row, group] = getattr(token, name)
        self.token = TokenBytes(*tokens)  # of arrays (n,), for what is the same in all layers
        self.slices = None
        if any(pack.slices for pack in packs):
            self.slices = PackSlices.of([pack.slices for pack in packs], self.length.tolist())
            self.sliced = job.token_bytes  # all ranks cache all keys


class RunArrays:
    """A run on one pipeline rank in arrays of bytes, with axes for P passes, C chunks, K kinds of
    recomputation, and L layers of a stage, from its end."""

    def __init__(self, rank: PipelineRank, packs: RunPacks, flow: Flow | None, *, reduced: bool) -> None:
        """
        Args:
            flow: the order of passes; None is the schedule's.
            reduced: whether there are gradients of earlier runs.
        """
        n = len(packs.packs)
        self._rank, self._packs = rank, packs
        self._kind, stage, self._place = rank.actions(n, flow).T  # (P,)
        self._stage_of, self._place_of = np.divmod(np.arange(len(rank.stages) * n), n)  # (C,)
        self.own = stage * n + self._place  # (P,), the chunk of the pass
        self.layers = rank.layers[self._stage_of]  # (C,), how many there are
        self.free = packs.sharers[self._place_of] == 1  # (C,), whether it may have a mix
        self._backward = (self._kind == B) | (self._kind == I)
        freeing = (self._kind == B) | (self._kind == W)
        self._passes = np.arange(len(self._kind))
        self._end = self._when(freeing)
        passes = self._passes[:, None]
        self.in_flight = (passes >= self._when(self._kind == F)) * 1.0 - (passes > self._end)
        """(P, C), 1 where the chunk's activations are there."""

        first = rank.alone & (not reduced) & (self._passes <= self._end.min())  # nothing was reduced before
        terms = "activations", "backward", "gathered", "cache"
        # By the term (P,), whatever layers keep.
        self.terms = {term: np.zeros(len(self._kind)) for term in terms}
        self.terms["gradients"] = rank.gradients * (reduced | (rank.alone & ~first))
        self._add_ends()
        # By the term (P, M, L), beside what a layer keeps and makes, at M moments.
        self._moments = 3 if rank.alone else 1 if packs.slices is None else 2
        self._beside = {term: np.zeros((len(self._kind), self._moments, 1)) for term in terms}
        self._beside["backward"][self._kind == W] = NEVER
        self._beside["backward"][~self._backward, ATTENTION:] = NEVER
        if rank.alone:
            self._beside["activations"][self._backward, :, 0] = -self._output[self.own[self._backward], None]
            which = 1 + 2 * first + (self._passes == self._passes[-1])
            self._beside["gathered"] = rank.in_layers[np.where(self._backward, which, 0)]
        else:
            gone = self._passes[:, None] > self._end.reshape(-1, n).min(axis=1)
            self.terms["gathered"] = rank.in_stages[0] + gone @ rank.in_stages[1:]
        if packs.slices is not None:
            self._add_slices(packs.slices, stage)
        elif rank.alone:
            self._beside["backward"][:, ATTENTION] = NEVER
        # Of the loss, at two moments: bytes (2, P), and of whole weights and gradients.
        self._loss, self._in_loss = np.full((2, len(self._kind)), NEVER), np.zeros(2)
        if rank.last:
            computing = (self._kind == (B if rank.regroups else F)) & (stage == len(rank.stages) - 1)
            for number, (bytes_, gathered) in enumerate(rank.whole.in_loss(packs.token, ())):
                self._in_loss[number] = gathered if rank.alone else gathered - rank.in_stages[0]
                self._loss[number, computing] = (bytes_ * packs.length)[self._place[computing]]
        self.there = np.asarray(sum(self.terms.values()))
        self._extra = np.asarray(sum(self._beside.values()))
        self._least = np.maximum((self._loss + self._in_loss[:, None]).max(axis=0), 0.0)

    def counts(self, kind: int | None = None) -> Ints:
        """int64 (C, K), layers of each kind: a micro-batch's mix, or all of the job's kind; where it may have
        a mix, all of another one, by its number in KINDS."""
        jobs = KINDS.index(self._rank.job.memory.recompute)
        result = np.zeros((len(self.layers), len(KINDS)), dtype=np.int64)
        result[range(len(result)), np.where(self.free, jobs if kind is None else kind, jobs)] = self.layers
        for place, pack in enumerate(self._packs.packs):
            if pack.mix is not None:
                result[self._place_of == place] = pack.mix[list(self._rank.stages)]
        return result

    def bytes_of(self, counts: Ints) -> Floats:
        """(P,), at the fullest moment of each pass, with int64 (C, K), layers of each kind."""
        return np.asarray(self.there + self.by_chunk(counts).sum(axis=0))

    def by_chunk(self, counts: Ints) -> Floats:
        """(C, P), each chunk's part of `bytes_of`."""
        layers = self._layers(np.arange(len(counts)), counts)
        result = self.in_flight.T * layers[0].sum(axis=-1)[:, None]
        result[self.own, self._passes] += self._most(layers[:, self.own], self._passes)
        return np.asarray(result)

    def of_chunk(self, chunk: int, counts: Ints) -> Floats:
        """(P,), a chunk's row of `by_chunk`, with int64 (K,)."""
        layers = self._layers(np.array([chunk]), counts[None])
        own = self._passes_of[chunk]
        result = self.in_flight[:, chunk] * layers[0].sum()
        result[own] += self._most(layers[:, [0] * len(own)], own)
        return np.asarray(result)

    def peak(self, counts: Ints) -> RankMemory:
        """Memory at the fullest moment of the run, with int64 (C, K), layers of each kind."""
        layers = self._layers(np.arange(len(counts)), counts)
        held = self.in_flight @ layers[0].sum(axis=-1)
        most = self._in_layers(layers[:, self.own], self._passes).max(axis=(1, 2))
        now = int((self.there + held + np.maximum(most, self._least)).argmax())
        terms = {term: float(bytes_[now]) for term, bytes_ in self.terms.items()}
        terms["activations"] += float(held[now])
        if most[now] >= self._least[now]:
            kept, forward, backward, attention = layers[:, self.own[now]]
            moments = self._in_layers(layers[:, self.own[[now]]], self._passes[[now]])[0]
            moment, layer = divmod(int(moments.argmax()), len(kept))
            at_work = backward if self._backward[now] else forward
            made = (at_work, attention, np.full_like(kept, self._hidden[self.own[now]]))
            terms["activations"] -= float(kept[: layer + (moment == BEHIND)].sum())
            terms["backward"] += float(made[moment][layer])
            for term, bytes_ in self._beside.items():
                terms[term] += float(np.broadcast_to(bytes_[now], moments.shape)[moment, layer])
        elif self._least[now] > 0:
            number = int((self._loss[:, now] + self._in_loss).argmax())
            terms["loss"] = float(self._loss[number, now])
            terms["gathered"] += float(self._in_loss[number])
        tokens = self.in_flight[now] @ self._packs.tokens[self._place_of]
        rounded = {term: round(bytes_) for term, bytes_ in terms.items()}
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

    def _most(self, layers: Floats, passes: Ints) -> Floats:
        """(p,), most bytes that passes make, less what they free by then, with (4, p, L) of their chunks."""
        return np.asarray(np.maximum(self._in_layers(layers, passes).max(axis=(1, 2)), self._least[passes]))

    def _in_layers(self, layers: Floats, passes: Ints) -> Floats:
        """(p, M, L), the same at each moment of each layer."""
        kept, forward, backward, attention = layers
        freed = kept.cumsum(axis=-1) - kept
        result = np.empty((len(passes), self._moments, kept.shape[-1]))
        result[:, AT] = np.where(self._backward[passes, None], backward, forward) - freed
        if self._moments > ATTENTION:
            result[:, ATTENTION] = attention - freed
        if self._moments > BEHIND:
            result[:, BEHIND] = self._hidden[self.own[passes], None] - freed - kept
        result += self._extra[passes]
        return result

    def _layers(self, chunks: Ints, counts: Ints) -> Floats:
        """(4, chunks, L), bytes of the layers of chunks, with int64 (chunks, K): kept, and made in the
        forward pass, in the backward pass and at attention's gradients."""
        kinds = (self._rank.steps[:, None] >= counts.cumsum(axis=-1)[:, None]).sum(axis=-1)
        result = self._packs.layers[
            :, self._place_of[chunks, None], self._rank.numbers[self._stage_of[chunks]], kinds
        ]
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
        """Adds inputs, the outputs of stages, and gradients that wait for those of weights."""
        rank, token, length = self._rank, self._packs.token, self._packs.length
        self._hidden = (length * token.hidden)[self._place_of]
        last = rank.last & (self._stage_of == len(rank.stages) - 1)
        self._output = self._hidden + last * (length * token.hidden_gathered)[self._place_of]
        activations = self.terms["activations"]
        activations += (length * token.inputs).sum()
        if rank.regroups:  # it keeps the inputs of layers and of the head, which may have a stage of its own
            self._states = self._hidden * np.array(rank.states)[self._stage_of]
            activations += self.in_flight @ (self._states * (self.layers == 0))
            self.terms["backward"] += self._output[self.own] + self._hidden[self.own] * self._backward
            return
        activations += self.in_flight @ self._output
        if (self._kind == I).any():
            passes, waiting = self._passes[:, None], self.layers * (length * token.waiting)[self._place_of]
            activations += ((passes >= self._when(self._kind == I)) & (passes <= self._end)) @ waiting
        if (
            rank.last and not rank.alone
        ):  # inputs of what is done, because of their losses; the latest's gradient
            done = self._passes[((self._kind == B) | (self._kind == W)) & last[self.own]]
            inputs, kept = self._hidden[self.own[done]], np.zeros(len(self._kind) + 1)
            kept[done + 1] = inputs + np.diff(inputs, prepend=0.0)
            activations += kept.cumsum()[:-1]

    def _add_slices(self, slices: PackSlices, stage: Ints) -> None:
        """Adds the cache of slices, with what a backward pass has beside it."""
        token, layers = self._packs.sliced, self._rank.layers
        for number, count in enumerate(layers.tolist()):
            (forward,) = np.nonzero((stage == number) & (self._kind == F))
            (backward,) = np.nonzero((stage == number) & (self._kind == B))
            keys, gradients = slices.cached(forward, backward, self._place)
            self.terms["cache"] += count * (keys * token.cached + gradients * token.cached_gradients)
        made = self._backward * layers[stage] * slices.made[self._place] * token.cached_gradients
        beside = slices.beside[self._place] * token.cached * (not self._rank.regroups)
        self._beside["backward"][:, ATTENTION, 0] += np.where((made > 0) | (beside > 0), beside, NEVER)
        # It makes gradients of prefixes layer by layer: they are there from attention's gradients on.
        layer = self._rank.steps + np.array([[0], [1], [1]])[: self._moments]
        self._beside["cache"] = made[:, None, None] * layer / np.maximum(layers[stage], 1)[:, None, None]
