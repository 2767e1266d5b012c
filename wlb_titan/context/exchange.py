"""The seconds of a context-parallel strategy's collectives on the hardware of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from wlb_titan.context.strategy import ContextStrategy, Move, MoveSeconds
from wlb_titan.cost.analytic import BYTES
from wlb_titan.cost.cluster import Cluster, Link
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import ModelShape
from wlb_titan.cost.workload import ExchangeSeconds


@dataclass(frozen=True)
class ExchangeCost:
    """The collectives of one layer.

    Attributes:
        moves: what travels, as of `Exchange`; none without context parallelism.
        cluster: the hardware.
        stride: ranks that two context-parallel neighbours are apart.
        repeats: whether activation checkpointing moves again what it does not keep.
    """

    moves: tuple[Move, ...]
    cluster: Cluster
    stride: int
    repeats: bool

    @classmethod
    def of(
        cls,
        strategy: ContextStrategy | None,
        model: ModelShape,
        cluster: Cluster,
        degrees: Degrees,
        *,
        repeats: bool,
    ) -> ExchangeCost:
        """Of a model's layers."""
        moves = () if strategy is None else strategy.exchange(model, degrees.tensor).moves
        return cls(moves, cluster, degrees.strides["cp"], repeats)

    def link(self, move: Move) -> Link:
        """What a collective goes over."""
        return self.cluster.link(move.ranks, self.stride * move.stride)

    @cached_property
    def always(self) -> ExchangeSeconds:
        """For each token of a micro-batch, of those that move all of them."""
        return self.seconds([float(move.always) for move in self.moves])

    def seconds(self, travelling: Sequence[float]) -> ExchangeSeconds:
        """For a micro-batch of which so many tokens travel by each move."""
        moving = repeated = latency = 0.0
        for tokens, move in zip(travelling, self.moves, strict=True):
            seconds = tokens * self._token_seconds(move)
            moving += seconds
            repeated += 0.0 if move.kept else seconds
            latency += self._latency(move) if tokens else 0.0
        return ExchangeSeconds(moving, repeated, latency)

    def in_all_passes(self, travelling: Sequence[float]) -> tuple[float, float]:
        """Seconds for such a micro-batch in all passes, the repeated ones too, and bytes that a rank receives
        in them."""
        seconds = received = 0.0
        for tokens, move in zip(travelling, self.moves, strict=True):
            passes = self._passes(move) if tokens else 0
            seconds += passes * (tokens * self._token_seconds(move) + self._latency(move))
            received += passes * tokens * BYTES * move.received
        return seconds, received

    def of_moves(self) -> list[MoveSeconds]:
        """In all passes, of each move."""
        each = ((self._passes(move), move) for move in self.moves)
        return [MoveSeconds(n * self._token_seconds(move), n * self._latency(move)) for n, move in each]

    def _passes(self, move: Move) -> int:
        """How often it runs for a micro-batch: forward, backward, and once more where it is not kept."""
        return 3 if self.repeats and not move.kept else 2

    def _token_seconds(self, move: Move) -> float:
        return BYTES * move.received / self.link(move).bandwidth

    def _latency(self, move: Move) -> float:
        return move.collectives * self.link(move).latency
