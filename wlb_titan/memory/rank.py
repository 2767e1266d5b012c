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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.context.strategy import ALL_KEYS, KeyShares
from wlb_titan.layers.rates import Rates
from wlb_titan.layers.recompute import KINDS
from wlb_titan.memory.layer import FsdpWhole, RankWeights, token_bytes
from wlb_titan.memory.slice_cache import CachedSlice
from wlb_titan.pipeline.schedule import rank_actions
from wlb_titan.plan import Action, Flow

GIB = 2**30
PASSES = "FBIW"
F, B, I, W = range(len(PASSES))
PASSING = "activations", "backward", "gathered", "cache", "gradients", "loss"  # terms that follow from passes


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The peak of one pipeline rank, term by term as above, in bytes of one GPU."""

    rank: int
    weights: int
    optimizer: int
    rotary: int
    gradients: int = 0
    gathered: int = 0
    activations: int = 0
    backward: int = 0
    loss: int = 0
    cache: int = 0
    dimensions: int = 0
    parameters: int  # number of weights of the rank's stages, over all tensor-parallel and FSDP ranks
    layers: int  # of the rank's stages
    tokens: int = 0  # in flight at the peak, summed over the rank's stages

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


class PipelineRank:
    """What of a pipeline rank's memory no micro-batch changes. Layers of a stage count from its end, as they
    go backward; L is the most of any stage."""

    def __init__(self, rates: Rates, number: int, *, regroups: bool = False) -> None:
        self.rates, self._number = rates, number
        self.stages, layers = rates.shape.stages_of(number), rates.layers
        self.layers = np.array([layers[stage] for stage in self.stages])
        self.last = len(layers) - 1 in self.stages  # whether it has the head
        self.alone = rates.degrees.pipeline == 1
        self.regroups = regroups
        self.token = token_bytes(rates)  # of all keys, which all ranks cache of slices
        self.states = [kept_states(layers)[stage] for stage in self.stages]
        self.steps = np.arange(max(1, *self.layers))
        settings, degrees = rates.memory, rates.degrees
        numbers = [rates.numbers_of_stage(stage) for stage in self.stages]
        self.numbers = np.zeros((len(self.stages), len(self.steps)), dtype=np.int64)
        """(stages, L), the numbers of layers in the job's account."""
        for row, own in zip(self.numbers, numbers, strict=True):
            row[: len(own)] = own[::-1]
        kinds = len(rates.account.layers) if rates.account is not None else 1
        self.shares = [np.bincount(own or [0], minlength=kinds) / max(len(own), 1) for own in numbers]
        """By stage (kinds of layers,), how many of its layers are of each number."""
        if rates.account is None:
            weights = RankWeights.of(rates.model, degrees, layers, self.stages)
            tables = float(self.layers.sum() * settings.rotary_bytes * rates.model.head_dim)
        else:
            repeating = [kind.name for kind in KINDS] if rates.mixes else [settings.recompute.name]
            weights = RankWeights.told(rates.account, rates.model, layers, self.stages, repeating)
            tables = sum(layer.tables for layer in weights.layers)
        # Bytes of a weight's share on this GPU.
        share = settings.parameter_bytes / (degrees.tensor * degrees.sharding_ranks)
        self.gradients = weights.trained * share
        self.whole = FsdpWhole(weights, degrees, settings, layers)
        self.still = RankMemory(
            rank=number,
            weights=round(weights.all * share),
            optimizer=round(weights.trained * share / settings.parameter_bytes * settings.optimizer_bytes),
            rotary=round(settings.window * tables),
            parameters=weights.all,
            layers=int(self.layers.sum()),
        )
        self._in_order = cache(self._scheduled)

    @cached_property
    def in_stages(self) -> Floats:
        """(1 + stages,), bytes of whole weights and gradients in a pipeline's passes, and how much more they
        are once a stage has gone backward."""
        before = self.whole.in_pipeline(())
        return np.array([before, *(self.whole.in_pipeline([stage]) - before for stage in self.stages)])

    @cached_property
    def in_layers(self) -> Floats:
        """(5, 3, L), the same without a pipeline, by the moments of `RunArrays`: of a forward pass, and of a
        backward pass in the middle of a step, of its last, of its first, and of one that is both."""
        layers = self.steps[::-1].tolist()
        result = np.full((5, 3, len(layers)), self.whole.in_forward)
        for first, last in itertools.product((False, True), repeat=2):
            for row, behind in enumerate((False, False, True)):
                of_layers = [self.whole.in_backward(n, behind=behind, first=first, last=last) for n in layers]
                result[1 + 2 * first + last, row] = of_layers
        return result

    @cached_property
    def in_loss(self) -> Floats:
        """(2,), at the softmax and the head's gradient; in a pipeline how much more than in other passes."""
        whole = np.array([gathered for _, gathered in self.whole.in_loss(self.token, ())])
        return whole if self.alone else whole - self.in_stages[0]

    def actions(self, micro_batches: int, flow: Flow | None) -> Ints:
        """int64 (passes, 3), the rank's passes in order: kind of PASSES, number of the stage, micro-batch."""
        return self._in_order(micro_batches) if flow is None else self._rows(flow[self._number])

    def _scheduled(self, micro_batches: int) -> Ints:
        rows = self._rows(rank_actions(self.rates.shape, micro_batches, self._number))
        if 0 not in self.stages:
            return rows
        kind, first = rows[:, 0], rows[:, 1] == 0  # where nobody waits for the gradient of token ids
        kind[first & (kind == W)] = B
        return np.asarray(rows[~first | (kind != I)])

    def _rows(self, actions: Iterable[Action]) -> Ints:
        stages = {stage: number for number, stage in enumerate(self.stages)}
        return np.array([(PASSES.index(kind), stages[stage], place) for kind, stage, place in actions])


def kept_states(layers: Sequence[int]) -> list[int]:
    """How many hidden states of a token each stage keeps if passes are regrouped: inputs of its layers, and
    of the head. The input of the very first layer is computed again from token ids."""
    last = len(layers) - 1
    return [n - (stage == 0 and n > 0) + (stage == last) for stage, n in enumerate(layers)]
