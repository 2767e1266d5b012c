"""The memory of each pipeline rank at the peak of a step: whether a job fits, before it runs.

    total = weights + optimizer + rotary + gradients + gathered + activations + cache + backward + loss

A rank runs its passes in a fixed order, so its memory can be followed from pass to pass:

- weights, optimizer   this GPU's shards of them, always there; the optimizer's state from its first step on
- rotary               every layer's table of rotary factors for the whole context window
- gathered             parameters and gradients that FSDP has whole beside the shards (`layer.FsdpWhole`)
- gradients            shards, once an earlier run through the pipeline or, without one, an earlier
                       micro-batch has reduced them
- activations          a forward pass adds those kept in each layer and its stage's output, a backward pass
                       frees them, layer by layer. Micro-batches differ in length, so not their number counts
                       but the largest sum of those in flight together. The last stage has its output gathered
                       over the tensor-parallel ranks and the input of the last norm; in a pipeline it keeps
                       the inputs of finished micro-batches until the step is over, because it keeps their
                       losses, and the gradient of the last of them. Where the gradients of weights wait (zero
                       bubble), a layer's activations wait with them, and the gradients of its linear layers'
                       and norms' outputs. Token ids, positions and labels are there throughout
- cache                K and V of documents in slices, from the first slice's forward pass to its backward
                       pass, and their gradients, in float32, from the backward pass of the last slice on,
                       which makes them layer by layer while it frees its activations
- backward             of the current layer: recomputed activations, gradients, K and V; or what a forward
                       pass makes and does not keep
- dimensions           memory of the user's own dimensions throughout ([[wlb.dimensions]])
- loss                 logits of one chunk and the softmax; the gradient of the whole hidden state in float32,
                       and its copy in the compute type

`layer.py` has the bytes of a layer, of the loss and of FSDP. Not counted: the allocator's fragmentation,
CUDA's and NCCL's own memory; `fits.USABLE` leaves room for them. `wlb-titan dryrun` compares all of this
with a trace of the program itself (docs/dryrun.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from wlb_titan.arrays import Ints
from wlb_titan.context.strategy import ALL_KEYS, KeyShares
from wlb_titan.memory.layer import FsdpWhole, RankWeights, TokenBytes
from wlb_titan.memory.recompute import KINDS, Recompute
from wlb_titan.memory.slice_cache import CachedSlice, SliceCache
from wlb_titan.pipeline.schedule import rank_actions
from wlb_titan.plan import Action, Flow

if TYPE_CHECKING:
    from wlb_titan.job import Job

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The peak of one pipeline rank, term by term as above, in bytes of one GPU."""

    rank: int
    weights: int
    optimizer: int
    rotary: int
    gradients: int
    gathered: int
    activations: int
    backward: int
    loss: int
    cache: int = 0
    dimensions: int = 0
    parameters: int  # number of weights of the rank's stages, over all tensor-parallel and FSDP ranks
    layers: int  # of the rank's stages
    tokens: int  # in flight at the peak, summed over the rank's stages

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in TERMS)

    def explain(self) -> str:
        """The terms, largest first."""
        head = (
            f"pipeline rank {self.rank}: {self.total / GIB:.2f} GiB with {self.layers} layers of "
            f"{self.parameters:,} weights and {self.tokens:,} tokens in flight"
        )
        terms = sorted(((getattr(self, name), name) for name in TERMS), reverse=True)
        lines = [f"  {name.replace('_', ' '):14}{size / GIB:9.3f} GiB" for size, name in terms if size]
        return "\n".join([head, *lines])


TERMS = tuple(
    field.name for field in fields(RankMemory) if field.name not in ("rank", "parameters", "layers", "tokens")
)


class PackSize(NamedTuple):
    """The properties of a micro-batch that memory depends on."""

    length: int  # tokens of one data-parallel rank, padding included
    sharers: int = 1  # data-parallel ranks that share it
    keys: KeyShares = ALL_KEYS
    slices: Sequence[CachedSlice] = ()
    mix: Ints | None = None  # as of `MicroBatch.mix`


class Passes(NamedTuple):
    """A replica's run through the pipeline."""

    packs: Sequence[PackSize]  # by the `place` of its actions
    flow: Flow | None = None  # None is the schedule's order

    @classmethod
    def of(cls, lengths: Sequence[int], sharers: int = 1) -> Passes:
        return cls([PackSize(length, sharers) for length in lengths])


class Moment(NamedTuple):
    """Bytes at one moment of a pass, by the term of `RankMemory`."""

    activations: float = 0.0
    backward: float = 0.0
    loss: float = 0.0
    gathered: float = 0.0
    cache: float = 0.0


class Pass(NamedTuple):
    """What a pass does to memory, and what is there meanwhile besides the layers' activations."""

    action: Action
    pack: PackSize
    token: TokenBytes  # under the job's kind of recomputation
    stage: int
    length: int  # tokens of all data-parallel ranks that share it
    layers: Sequence[TokenBytes]  # of the stage, from its first layer on
    ends: float  # bytes of inputs, of stages' outputs, and of gradients that wait for W
    cached: float  # as of `SliceCache.bytes_`
    beside: float  # as of `SliceCache.begin`
    made: float
    gradients: float  # bytes of those that earlier passes have reduced
    went_back: frozenset[int]  # stages that have gradients
    whole: partial[float]  # of `FsdpWhole.in_backward`, for a backward pass


class RankPeak:
    """Follows the memory of one pipeline rank from pass to pass."""

    loss_in_forward: ClassVar[bool] = True  # forward passes of the last stage compute the loss

    @staticmethod
    def kept_by_stages(token: TokenBytes, layers: Sequence[int]) -> list[float]:
        """Bytes that a token leaves in each stage's layers from the forward to the backward pass."""
        return [token.kept * count for count in layers]

    def __init__(self, job: Job, number: int) -> None:
        self.job, self._number = job, number
        self.stages, self._layers = job.shape.stages_of(number), job.layers
        self._last = len(self._layers) - 1
        self._alone = job.degrees.pipeline == 1
        self._own_layers = sum(self._layers[stage] for stage in self.stages)
        kinds = [kind.name for kind in KINDS] if job.mixes else [job.memory.recompute.kept_as]
        if job.account is None:
            self._weights = RankWeights.of(job.model, job.degrees, self._layers, self.stages)
        else:
            self._weights = RankWeights.told(job.account, job.model, self._layers, self.stages, kinds)
        # Bytes of a weight's share on this GPU.
        self._share = job.memory.parameter_bytes / (job.degrees.tensor * job.degrees.sharding_ranks)
        self._tables = float(self._own_layers * job.memory.rotary_bytes * job.model.head_dim)
        if job.account is not None:
            every = [layer for stage in self.stages for layer in job.account.of_stage(self._layers, stage)]
            self._tables = sum(layer.weights.tables for layer in every)
        self._whole = FsdpWhole(self._weights, job.degrees, job.memory, self._layers)
        self._in_pipeline, self._in_backward = cache(self._whole.in_pipeline), cache(self._whole.in_backward)
        layers = range(max(self._own_layers, 1))

        def most_whole(first: bool, last: bool) -> float:
            behind = [(layer, behind) for layer in layers for behind in (False, True)]
            return max(self._in_backward(n, behind=b, first=first, last=last) for n, b in behind)

        self._most_whole = cache(most_whole)

    def peak(self, passes: Passes, *, reduced: bool) -> RankMemory:
        """Memory at the fullest moment of one run; `reduced`: there are gradients of earlier runs."""
        in_flight, held = 0, 0.0  # tokens of this rank, bytes of their activations in layers
        most, fullest = -1.0, (Moment(), 0.0, 0)
        for pass_ in self.passes(passes, reduced=reduced):
            kind, kept = pass_.action.kind, pass_.length * self._in_layers(pass_)
            if kind == "F":
                held += kept
                in_flight += pass_.pack.length
                moments = self._forward(pass_)
            elif kind == "W":
                moments = iter([Moment(gathered=self._in_pipeline(pass_.went_back))])
            elif held + pass_.ends + pass_.cached + pass_.gradients + self._at_most(pass_) < most - 1:
                moments = iter(())  # it cannot be fuller
            else:
                moments = self._backward(pass_)
            for moment in moments:
                live, cache = held + pass_.ends + moment.activations, pass_.cached + moment.cache
                total = live + moment.backward + moment.loss + moment.gathered + cache + pass_.gradients
                if total > most:
                    now = moment._replace(activations=live, cache=cache)
                    most, fullest = total, (now, pass_.gradients, in_flight)
            if kind in ("B", "W"):  # I frees nothing that counts
                held -= kept
                in_flight -= pass_.pack.length
        return self.at(*fullest)

    def passes(self, passes: Passes, *, reduced: bool) -> Iterator[Pass]:
        """The passes of a run, in order."""
        tokens, layers = self.job.token_bytes_of, self._layers
        slice_cache = SliceCache(tokens(1, ALL_KEYS), layers)
        # Token ids, positions and labels, which are there throughout.
        ends = sum(tokens(p.sharers, p.keys).inputs * p.sharers * p.length for p in passes.packs)
        handed_back = 0.0
        went_back: frozenset[int] = frozenset()
        if passes.flow is None:
            actions = list(rank_actions(self.job.shape, len(passes.packs), self._number))
        else:
            actions = list(passes.flow[self._number])
        for number, action in enumerate(actions, start=1):
            kind, stage, place = action
            if stage == 0 and kind in ("I", "W"):  # nobody waits for the gradient of token ids
                if kind == "I":
                    continue
                kind = "B"
            pack = passes.packs[place]
            token, length = tokens(pack.sharers, pack.keys), pack.length * pack.sharers
            beside, made = slice_cache.begin(action, pack.slices, length)
            whole = partial(self._in_backward, first=not reduced, last=number == len(actions))
            output, waiting = length * self._kept_output(token, stage), length * token.waiting * layers[stage]
            ends += output if kind == "F" else waiting if kind == "I" else 0.0
            yield Pass(
                action._replace(kind=kind),
                pack,
                token,
                stage,
                length,
                self._of_layers(pack, stage),
                ends,
                slice_cache.bytes_,
                beside,
                made,
                self._weights.trained * self._share if reduced else 0.0,
                went_back,
                whole,
            )
            slice_cache.end(action, pack.slices)
            if kind == "W":
                ends -= waiting
            if kind in ("B", "W"):
                ends -= output
                went_back |= {stage}
                if self._alone:
                    reduced = True
                elif stage == self._last and self.loss_in_forward:
                    ends += 2 * length * token.hidden - handed_back
                    handed_back = length * token.hidden

    def most_gathered(self, pass_: Pass) -> float:
        """Most bytes of whole weights and gradients in any layer of a pass."""
        if not self._alone:
            return self._in_pipeline(pass_.went_back)
        return (
            self._whole.weights(1) if pass_.action.kind == "F" else self._most_whole(**pass_.whole.keywords)
        )

    def _at_most(self, pass_: Pass) -> float:
        """A bound for the sum of any of `_backward`'s moments."""
        alike = {id(layer): layer for layer in pass_.layers or [pass_.token]}
        most = max(max(layer.backward, layer.attention, layer.hidden) for layer in alike.values())
        return pass_.length * most + pass_.beside + pass_.made + self.most_gathered(pass_)

    def in_loss(self, pass_: Pass) -> float:
        """Most bytes of the loss behind a forward pass, with whole weights and gradients, if there is one."""
        if pass_.stage != self._last:
            return 0.0
        moments = self._whole.in_loss(pass_.token, pass_.went_back)
        return max(pass_.length * bytes_ + gathered for bytes_, gathered in moments)

    def _of_layers(self, pack: PackSize, stage: int) -> list[TokenBytes]:
        """Those that keep most come last, and go backward first, before fuller repetitions need room."""
        tokens = self.job.token_bytes_of
        kinds: list[Recompute | None] = [None] * self._layers[stage]
        if pack.mix is not None:
            kinds = [kind for kind, count in zip(KINDS, pack.mix[stage], strict=True) for _ in range(count)]
        numbers = self.job.numbers_of_stage(stage)
        pairs = zip(reversed(kinds), numbers, strict=True)
        return [tokens(pack.sharers, pack.keys, kind, number) for kind, number in pairs]

    def _forward(self, pass_: Pass) -> Iterator[Moment]:
        """The fullest moments of a forward pass: in the last layer of a kind, and in the loss."""
        gathered = self._whole.weights(1) if self._alone else self._in_pipeline(pass_.went_back)
        later = 0.0  # bytes a token that later layers will keep
        for layer, alike in itertools.groupby(reversed(pass_.layers)):
            yield Moment(-pass_.length * later, pass_.length * layer.forward, 0.0, gathered)
            later += layer.kept * len(list(alike))
        if pass_.stage == self._last:
            for bytes_, gathered in self._whole.in_loss(pass_.token, pass_.went_back):
                yield Moment(loss=pass_.length * bytes_, gathered=gathered)

    def _backward(self, pass_: Pass) -> Iterator[Moment]:
        """The fullest moments of a backward pass, in its first two layers and in its last, and where kinds
        change. Layer by layer it frees activations, makes gradients of prefixes and, without a pipeline, FSDP
        gathers and reduces."""
        token, length, layers = pass_.token, pass_.length, pass_.layers
        made, beside = pass_.made, pass_.beside
        count = max(len(layers), 1)
        ends = length * self._output(token, pass_.stage) if self._alone else 0.0  # free by then
        gathered = 0.0 if self._alone else self._in_pipeline(pass_.went_back)
        freed = [0.0, *itertools.accumulate(layer.kept for layer in reversed(layers))]
        fullest = {count - 1, max(count - 2, 0), 0}
        if pass_.pack.mix is not None:
            changes = (n for n in range(1, count) if layers[n - 1] is not layers[n])
            fullest.update(number for n in changes for number in (n - 1, n))
        for number in sorted(fullest, reverse=True):
            layer = layers[number] if layers else token
            live = -ends - length * freed[count - 1 - number]
            before, after = (made * done / count for done in (count - 1 - number, count - number))
            if self._alone:
                gathered = pass_.whole(number, behind=False)
            yield Moment(live, length * layer.backward, 0.0, gathered, before)
            if made or beside:
                yield Moment(live, length * layer.attention + beside, 0.0, gathered, after)
            if self._alone:
                live -= length * layer.kept
                yield Moment(live, length * layer.hidden, 0.0, pass_.whole(number, behind=True), after)

    def at(self, moment: Moment, gradients: float, tokens: int) -> RankMemory:
        settings = self.job.memory
        return RankMemory(
            rank=self._number,
            weights=round(self._weights.all * self._share),
            optimizer=round(
                self._weights.trained * self._share / settings.parameter_bytes * settings.optimizer_bytes
            ),
            rotary=round(settings.window * self._tables),
            gradients=round(gradients),
            **{name: round(bytes_) for name, bytes_ in moment._asdict().items()},
            parameters=self._weights.all,
            layers=self._own_layers,
            tokens=tokens,
        )

    def _in_layers(self, pass_: Pass) -> float:
        """`kept_by_stages` of a pass's stage."""
        if pass_.pack.mix is not None or self.job.account is not None:
            return sum(layer.kept for layer in pass_.layers)
        return self.kept_by_stages(pass_.token, self._layers)[pass_.stage]

    def _kept_output(self, token: TokenBytes, stage: int) -> float:
        """Bytes per token of `_output` that are kept as long."""
        return self._output(token, stage)

    def _output(self, token: TokenBytes, stage: int) -> float:
        """Bytes per token of a stage's output, which it keeps, and of the last norm's input."""
        return token.hidden_gathered + token.hidden if stage == self._last else token.hidden
