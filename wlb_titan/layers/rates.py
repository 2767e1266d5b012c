"""What a token of a layout takes on a cluster: seconds of matrix products, of element-wise operators, of
collectives and of attention, and what context-parallel ranks exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.context.strategy import STRATEGIES, ContextStrategy, Exchange, ExchangeCost
from wlb_titan.cost.attention_latency import AttentionLatency
from wlb_titan.cost.cluster import Cluster, load_cluster
from wlb_titan.cost.models import Windows
from wlb_titan.cost.profile import AttentionShape, configured_latency, measured_cluster
from wlb_titan.cost.told import LayerWork, ModelAccount, Shape, Work
from wlb_titan.errors import PlanError
from wlb_titan.layers.layout import Layout
from wlb_titan.layers.recompute import KINDS, Recompute
from wlb_titan.layers.token import TokenSeconds
from wlb_titan.pipeline.schedule import KNOWN, SCHEDULES
from wlb_titan.plan import MicroBatch

TENSOR_COLLECTIVES = 4  # of a layer in each pass
EXPERT_COLLECTIVES = 2


@dataclass(frozen=True, kw_only=True)
class Rates(Layout):
    """A layout on a cluster, with the context-parallel strategy that divides its micro-batches."""

    cluster: Cluster = field(default_factory=lambda: load_cluster("h100_roce"))
    context: ContextStrategy.Config = field(default_factory=lambda: STRATEGIES.configure("per_sequence"))
    dtype: str = "bfloat16"  # of activations, as torch names it
    float8: tuple[float, float] = (0.0, 0.0)  # shares of products in float8: of layers, and of the head
    accounts: Mapping[Shape, ModelAccount] = field(default_factory=dict, repr=False)
    """Of the layers, by the shapes of jobs; for models that no formula knows."""
    memory_unknown: str = ""  # what of a layer no formula knows, such as "experts"; then it takes an account
    overlap: bool = True  # whether weights are gathered and gradients reduced while ranks compute
    tensor_overlap: float = 0.0
    """How much of tensor parallelism's collectives runs beside the layer's matrix products: 0 exposes all of
    them, 1 hides what lasts no longer than these products."""

    attention: AttentionLatency | None = None  # None: from [wlb.context] profile, or the cluster
    implementation: str = "auto"  # of attention, as in [wlb.attention]
    sm_margin: int = 0  # multiprocessors that attention leaves to other kernels

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.strategy  # which checks itself
        if not 0 <= self.tensor_overlap <= 1:
            raise PlanError(
                f"The overlap of tensor parallelism is {self.tensor_overlap}; it must be between 0 and 1."
            )

    def shared(self, sharers: int) -> Rates:
        """The rates of micro-batches that so many data-parallel ranks share (DP-Merge), who are as many times
        the context-parallel ranks. Raises PlanError where the strategy cannot have so many."""
        if sharers not in self._by_sharers:
            degrees = replace(self.degrees, context=sharers * self.degrees.context)
            self._by_sharers[sharers] = self._but(degrees=degrees, context=self.shared_context)
        return self._by_sharers[sharers]

    @cached_property
    def _by_sharers(self) -> dict[int, Rates]:
        return {1: self}

    def _but(self, **changes: Any) -> Rates:
        return Rates(**{field.name: getattr(self, field.name) for field in fields(Rates)} | changes)

    def of_group(self, groups: int) -> Rates:
        """The rates of a group's attention, of so many equal groups of heads."""
        if groups not in self._by_groups:
            latency = replace(self.latency, heads=self.latency.heads // groups)
            self._by_groups[groups] = self._but(attention=latency)
        return self._by_groups[groups]

    @cached_property
    def _by_groups(self) -> dict[int, Rates]:
        return {1: self}

    @cached_property
    def stage_windows(self) -> list[Windows]:
        """The sliding windows of each stage's layers."""
        first = np.cumsum((0, *self.layers[:-1])).tolist()
        return [self.model.window_shares(*own) for own in zip(first, self.layers, strict=True)]

    @cached_property
    def by_windows(self) -> dict[Windows, Rates]:
        """The rates at which stages attend whose layers have these windows."""
        if len(kinds := set(self.stage_windows)) == 1:
            return {windows: self for windows in kinds}
        attending = {windows: replace(self.latency, windows=windows) for windows in kinds}
        return {windows: self._but(attention=latency) for windows, latency in attending.items()}

    @property
    def shared_context(self) -> ContextStrategy.Config:
        """How ranks that share a micro-batch divide it: `per_document` without context parallelism."""
        if self.strategy is not None:
            return self.context
        divided: ContextStrategy.Config = STRATEGIES.configure("per_document", profile=self.context.profile)
        return divided

    @cached_property
    def divisor(self) -> int:
        """A micro-batch's tokens are a multiple of it."""
        context = self.strategy.divisor if self.strategy is not None else 1
        return math.lcm(context, self.degrees.context * self.multiple)

    def padded(self, tokens: int, sharers: int = 1) -> int:
        """Tokens, with padding, of a micro-batch that this many data-parallel ranks share."""
        divisor = self.shared(sharers).divisor
        return -(-tokens // divisor) * divisor

    def sized(
        self, draft: MicroBatch, dp_rank: int | None = None, least: int = 0, **others: Any
    ) -> MicroBatch:
        """The draft with length and padding, from `least` tokens on, and with other fields of a place in the
        plan. If ranks share it, length and padding are those of `dp_rank`, or of the first rank."""
        tokens, sharers = int(draft.lengths.sum()), draft.sharers
        length = self.padded(max(tokens, least * sharers), sharers)
        place = dp_rank - draft.merged.start if draft.merged and dp_rank is not None else 0
        padding = (length - tokens + place) // sharers  # shares differ by one token at most
        return replace(draft, length=length // sharers, padding=padding, dp_rank=dp_rank or 0, **others)

    def sharded(self, sized: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Micro-batches divided over the context-parallel ranks of all their sharers."""
        result = list(sized)
        for sharers in {m.sharers for m in sized}:
            strategy = self.shared(sharers).strategy
            if strategy is not None:
                places = [place for place, m in enumerate(sized) if m.sharers == sharers]
                packs = [(m.lengths, m.shared_length, m.elsewhere) for m in map(sized.__getitem__, places)]
                for place, (name, ranks) in zip(places, strategy.shard_all(packs), strict=True):
                    result[place] = replace(sized[place], sharding=name, ranks=ranks)
        return result

    @cached_property
    def latency(self) -> AttentionLatency:
        """Predicts the attention of one layer on one tensor-parallel rank."""
        if self.attention is not None:
            return self.attention
        latency = configured_latency(
            self.cluster, self.attention_shape, self.implementation, self.context.profile
        )
        return replace(latency, units=max(latency.units - self.sm_margin, 1))

    @property
    def attention_shape(self) -> AttentionShape:
        return AttentionShape.of(self.model, self.degrees.tensor, self.dtype)

    @cached_property
    def strategy(self) -> ContextStrategy | None:
        """The context-parallel strategy; None at a degree of 1."""
        if self.degrees.context == 1:
            return None
        alone: ContextStrategy = self.context.make(self.degrees.context, self.latency)
        alone.check(self.model, self.degrees.tensor)
        seconds = self._exchange_cost(alone).of_moves()
        strategy: ContextStrategy = self.context.make(self.degrees.context, self.latency, seconds)
        return strategy

    @cached_property
    def account(self) -> ModelAccount | None:
        """The account of the layers in this job's shape, if there is one; of GPUs only, as a trace is made
        for them."""
        account = self.accounts.get(self.layer_shape) if self.cluster.kind == "gpu" else None
        return None if account is None else account.at(self.measured_cluster.experts)

    @property
    def layer_shape(self) -> Shape:
        degrees, attention = self.degrees, ""
        if degrees.context > 1:
            attention = self.context.owner.attention + " in groups" * self.context.grouped
        return Shape(degrees.tensor, degrees.context, degrees.expert, attention)

    def numbers_of_stage(self, stage: int) -> tuple[int, ...]:
        """The number of each of a stage's layers in the `account`."""
        first, count = sum(self.layers[:stage]), self.layers[stage]
        return self.account.numbers[first : first + count] if self.account else (0,) * count

    @cached_property
    def exchange(self) -> Exchange | None:
        return None if self.strategy is None else self.strategy.exchange(self.model, self.degrees.tensor)

    @cached_property
    def exchanging(self) -> ExchangeCost:
        return self._exchange_cost(self.strategy)

    def _exchange_cost(self, strategy: ContextStrategy | None) -> ExchangeCost:
        moves = () if strategy is None else strategy.exchange(self.model, self.degrees.tensor).moves
        element, repeats = self.memory.compute_bytes, self.repeating.repeats_moves
        return ExchangeCost(moves, self.cluster, self.degrees.strides["cp"], element, repeats)

    @cached_property
    def measured_cluster(self) -> Cluster:
        """The cluster at the rates of the profile, if there is one."""
        return measured_cluster(self.cluster, self.context.profile)

    @cached_property
    def token(self) -> TokenSeconds:
        return TokenSeconds.of(self, self.measured_cluster, self.float8)

    @cached_property
    def layer_seconds(self) -> LayerSeconds:
        return LayerSeconds.of(self)

    @property
    def memory_known(self) -> bool:
        """Whether a prediction of memory may refuse the job or a policy. No account tells what waits for the
        gradients of weights."""
        waits = self.shape.splits and SCHEDULES[self.schedule].splits
        return not self.memory_unknown or (self.account is not None and not waits)

    @property
    def memory_predicted(self) -> bool:
        """Whether memory bounds micro-batches: there are a prediction and a device."""
        return self.memory_known and self.cluster.kind != "cpu"

    @cached_property
    def mixes(self) -> bool:
        """Whether the planner chooses what layers recompute: as needed, where memory is known."""
        ordered = self.degrees.pipeline == 1 or self.schedule in KNOWN
        return self.memory.as_needed and self.memory_predicted and ordered

    @property
    def repeating(self) -> Recompute:
        """The kind of recomputation by which passes are timed: where the planner chooses, most layers repeat
        little, and those of micro-batches without a choice yet nothing."""
        return KINDS[0] if self.mixes else self.memory.recompute

    @property
    def checkpointing(self) -> str:
        """What layers recompute, in words."""
        if self.mixes:
            return "as_needed checkpointing"
        if self.memory.checkpointing == "none":
            return "nothing is recomputed"
        said = f"{self.memory.checkpointing} checkpointing"
        if not self.memory.as_needed:
            return said
        why = "" if self.memory_known else f" with {self.memory_unknown}"
        return f"{said} (as_needed has no prediction of memory to go by{why})"


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Seconds of a layer for each token, float64 (stages,): the mean of a stage's layers; forward but for
    `inputs`, `weights` and `elements_back`."""

    matrices: Floats  # products
    inputs: Floats  # products for gradients of inputs
    weights: Floats  # and of weights
    elements: Floats  # element-wise operators
    elements_back: Floats
    tensor: Floats  # collectives of tensor parallelism
    experts: Floats  # and of expert parallelism
    repeated: Floats  # (stages, kinds), all but attention and its exchange

    @classmethod
    def of(cls, rates: Rates) -> LayerSeconds:
        if rates.account is not None:
            return cls.told(rates, rates.account)
        token, ones = rates.token, np.ones(len(rates.layers))
        return cls(
            matrices=ones * token.matrices,
            inputs=ones * token.matrices,
            weights=ones * token.matrices * (not rates.model.frozen),
            elements=ones * token.elements,
            elements_back=ones * 2 * token.elements,
            tensor=ones * _tensor(rates),
            experts=ones * _experts(rates),
            repeated=np.outer(ones, [_repeated(rates, kind) for kind in KINDS]),
        )

    @classmethod
    def told(cls, rates: Rates, account: ModelAccount) -> LayerSeconds:
        cluster, degrees = rates.measured_cluster, rates.degrees
        numbers = [rates.numbers_of_stage(stage) or (0,) for stage in range(len(rates.layers))]
        products = 1 / cluster.product_flops(rates.float8[0])

        def mean(of_layer: Callable[[LayerWork], float]) -> Floats:
            each = [of_layer(layer.work) for layer in account.layers]
            return np.array([np.mean([each[number] for number in own]) for own in numbers])

        def elements(work: Work) -> float:
            return (work.fused if rates.memory.compiled else work.elements) / cluster.memory_bandwidth

        def tensor(work: Work) -> float:
            moved = work.tensor * (degrees.tensor - 1) / degrees.tensor
            seconds = moved / cluster.link(degrees.tensor).bandwidth
            return seconds - min(rates.tensor_overlap * seconds, rates.token.matrices)

        def experts(work: Work) -> float:
            return cluster.all_to_all(work.expert, degrees.expert)

        def all_of(work: Work) -> float:
            return work.products * products + elements(work) + tensor(work) + experts(work)

        def repeated(kind: str) -> Floats:
            return mean(lambda layer: all_of(layer.kinds[kind].repeated))

        return cls(
            matrices=mean(lambda layer: products * layer.forward.products),
            inputs=mean(lambda layer: products * (layer.backward.products - layer.weight_products)),
            weights=mean(lambda layer: products * layer.weight_products),
            elements=mean(lambda layer: elements(layer.forward)),
            elements_back=mean(lambda layer: elements(layer.backward)),
            tensor=mean(lambda layer: tensor(layer.forward)),
            experts=mean(lambda layer: experts(layer.forward)),
            repeated=np.stack([repeated(kind.name) for kind in KINDS], axis=1),
        )


def _repeated(rates: Rates, kind: Recompute) -> float:
    """Seconds a token of what a layer repeats, but for attention and its exchange: of tensor parallelism's
    four collectives two gathers, and the reduction behind wo."""
    token, reduces_again = rates.token, rates.memory.reduces_again(rates.degrees)
    products = kind.repeated(rates.model, reduces_again)
    if products is None:
        return 0.0
    collectives = 3 / 4 if reduces_again else 1 / 2
    return token.matrices * products + token.elements + _tensor(rates) * collectives


def _tensor(rates: Rates) -> float:
    """Seconds a token that a layer waits for in one pass."""
    return rates.token.tensor - min(rates.tensor_overlap * rates.token.tensor, rates.token.matrices)


def _experts(rates: Rates) -> float:
    """Seconds a token of a layer's exchange in one pass."""
    model, degrees = rates.model, rates.degrees
    elements = model.visits * model.hidden / (degrees.context * degrees.tensor)
    bytes_ = elements * rates.memory.compute_bytes
    return EXPERT_COLLECTIVES * rates.cluster.all_to_all(bytes_, degrees.expert)
