"""Time and memory of backward passes with packs of their own: the asymmetric partition.

Forward passes keep the inputs of layers, of the first stage's first not, and of the head. Backward passes
compute layers again from these for their own tokens, and the head and the loss for the first time, so that
the head runs no more often than elsewhere. Hidden states go to the ranks that hold them in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from wlb_titan.cost.analytic import BYTES
from wlb_titan.cost.passes import MicroBatches, pass_times
from wlb_titan.memory.layer import TokenBytes
from wlb_titan.memory.rank import Moment, Passes, RankPeak
from wlb_titan.pipeline.graph import PassTimes
from wlb_titan.plan import ByPass

if TYPE_CHECKING:
    from wlb_titan.job import Job


def kept_states(layers: Sequence[int]) -> list[int]:
    """Hidden states of a token that each stage keeps: the inputs of its layers, and in the last of the head.

    The first stage makes its first layer's input again, from token ids.
    """
    last = len(layers) - 1
    return [n - (stage == 0 and n > 0) + (stage == last) for stage, n in enumerate(layers)]


def regrouped_times(job: Job, packs: ByPass[MicroBatches]) -> PassTimes:
    """The passes of micro-batches, as of `pass_times`."""
    times = packs.each(lambda one: pass_times(job, one))
    head = np.zeros((len(job.layers), 1, 1))
    head[-1] = job.token.head
    sharing = job.degrees.context * job.degrees.tensor
    states = np.array(kept_states(job.layers))[:, None, None]
    received = states * job.cluster.all_to_all(job.model.hidden * BYTES / sharing, sharing)
    return PassTimes(
        forward=times.forward.forward - head * packs.forward.tokens,
        inputs=times.backward.inputs + (head + received) * packs.backward.tokens,
        weights=times.backward.weights,
    )


class RegroupedRank(RankPeak):
    """A rank that keeps hidden states, and puts those of a backward pass together."""

    loss_in_forward = False

    @staticmethod
    def layer_bytes(token: TokenBytes) -> float:
        return token.hidden

    @staticmethod
    def kept_layers(layers: Sequence[int]) -> Sequence[int]:
        return kept_states(layers)

    def _inputs(self, passes: Passes) -> float:
        return sum(map(self._of_packs, passes.packs))

    def _kept(self, token: TokenBytes, stage: int) -> float:
        return self.layer_bytes(token) * self.kept_layers(self._job.layers)[stage]

    def _forward(self, token: TokenBytes, stage: int, length: int, went_back: set[int]) -> Iterator[Moment]:
        handed_on = self._output(token, stage)
        yield Moment(
            backward=length * (token.forward + handed_on), gathered=self._whole.in_pipeline(went_back)
        )

    def _backward(
        self,
        token: TokenBytes,
        stage: int,
        length: int,
        beside: float,
        made: float,
        went_back: set[int],
        whole: Callable[..., float],
    ) -> Iterator[Moment]:
        """A backward pass with tokens of several forward passes, and with the loss."""
        layers = max(self._job.layers[stage], 1)
        ends = token.hidden + self._output(token, stage)  # of the stage, its input and its output
        at_hand, loss = length * (ends + token.backward), 0.0
        if stage == self._last and token.loss > token.backward:
            at_hand, loss = length * ends, length * token.loss
        gathered = self._whole.in_pipeline(went_back, in_loss=loss > 0)
        yield Moment(0, at_hand, loss, gathered, made / layers)
        if made:
            freed = length * self._kept(token, stage) * (layers - 1) / layers
            yield Moment(-freed, at_hand, loss, gathered, made)
