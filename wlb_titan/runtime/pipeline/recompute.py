"""Backward passes with micro-batches of their own: layers are computed again for them.

The forward pass of a micro-batch runs without autograd. It leaves keys and values in the cache of the step,
and the hidden states between layers with its stage. A backward pass has other tokens. Layer by layer, from
the last to the first, it puts their hidden states together, runs the layer on them with autograd, and then
backward. So every layer is computed twice and a hidden state a layer and token is in flight, as with full
activation checkpointing, whose place this takes: it is the same, but that a backward pass takes its tokens
from several forward passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wlb_titan.runtime.compat import checkpoint_wrapper
from wlb_titan.runtime.pipeline.packflow import PackFlowSchedule
from wlb_titan.runtime.pipeline.regroup import Regrouping, gathered
from wlb_titan.runtime.pipeline.stage import PlannedStage


@dataclass(frozen=True)
class BackwardPass:
    """What a stage computes again.

    Attributes:
        regrouping: where the hidden states of its tokens lie.
        inputs: of the first stage: token ids.
        kwargs: the model's other arguments.
    """

    regrouping: Regrouping
    inputs: tuple[Tensor, ...]
    kwargs: dict[str, Any]


class RecomputedLayers:
    """The layers of a stage, and the hidden states between them, (1, L, D), that forward passes leave.

    Hidden state number k is the input of the stage's k-th layer, the one after the last its last layer's
    output.

    Args:
        model: the stage's part of the model, whose layers are wrapped.
        sharers: the ranks that share a micro-batch's hidden states; None for this one alone.

    Attributes:
        forward: the micro-batch whose forward pass is under way.
        backward: of that whose backward pass is under way, where its tokens lie. Without either, as in
            evaluation, layers run as always.
    """

    def __init__(self, model: nn.Module, sharers: dist.ProcessGroup | None) -> None:
        self.forward: int | None = None
        self.backward: Regrouping | None = None
        self._sharers = sharers
        self._kept: dict[int, dict[int, Tensor]] = defaultdict(dict)
        layers: Any = model.layers
        self._keeps_last = model.norm is not None
        self.number = len(layers)
        for number, (name, layer) in enumerate(layers.items()):
            layers[name] = checkpoint_wrapper(layer, checkpoint_fn=partial(self._run, number))

    def keep(self, number: int, hidden: Tensor) -> None:
        """Keeps a hidden state of the forward pass under way."""
        assert self.forward is not None
        self._kept[number][self.forward] = hidden

    def take(self, number: int, like: Tensor) -> Tensor:
        """That of the backward pass under way, of which it has no further use; shaped as `like`."""
        how, kept = self.backward, self._kept[number]
        assert how is not None
        with torch.no_grad():
            hidden = gathered(how, kept, like.new_zeros(like.shape), self._sharers)
        for source in how.over:
            del kept[source]
        return hidden

    def clear(self) -> None:
        """Forgets what is kept: of micro-batches of which a rank has padding only, or after an error."""
        self._kept.clear()
        self.forward = self.backward = None

    def _run(
        self, number: int, layer: Callable[..., Tensor], hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        call = partial(_called, layer, args, kwargs)
        after = number + 1
        if self.backward is not None:
            inputs = partial(self.take, number, hidden.detach()) if number else hidden.detach
            # Only the loss reads what comes out of layers.
            output = partial(self.take, after) if self._reads(after) else _nothing
            return _Again.apply(hidden, output, inputs, call)
        result = call(hidden)
        if self.forward is not None and (after < self.number or self._reads(after)):
            self.keep(after, result)
        return result

    def _reads(self, number: int) -> bool:
        return self._keeps_last and number == self.number


class _Again(torch.autograd.Function):
    """A layer that runs when its gradient is due."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        output: Callable[[Tensor], Tensor],
        inputs: Callable[[], Tensor],
        call: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.inputs, ctx.call = inputs, call
        return output(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            hidden = ctx.inputs().requires_grad_()
            output = ctx.call(hidden)
        torch.autograd.backward(output, *gradients)
        return hidden.grad, None, None, None


def _nothing(like: Tensor) -> Tensor:
    """Of the same shape, contiguous whatever `like` is: torch compares strides with what a stage declares."""
    return like.new_empty(like.shape)


def _called(layer: Callable[..., Tensor], args: Any, kwargs: dict[str, Any], hidden: Tensor) -> Tensor:
    return layer(hidden, *args, **kwargs)


class RecomputingStage(PlannedStage):
    """A stage whose backward passes may have micro-batches of their own; otherwise as `PlannedStage`.

    Args:
        args, kwargs: of `PlannedStage`.
        sharers: as of `RecomputedLayers`.

    Attributes:
        passes: the next step's backward passes; None where they are those of forward passes.
    """

    def __init__(self, *args: Any, sharers: dist.ProcessGroup | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.passes: Sequence[BackwardPass] | None = None
        self._layers = RecomputedLayers(self.submod, sharers)
        self._to_send: dict[int, Any] = {}  # states of forward passes, until their outputs are sent

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._layers.clear()
        self._to_send.clear()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.passes is None:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._layers.forward = fwd_chunk_id
        with torch.no_grad(), self._without_head():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._layers.forward = None
        # Backward passes count by themselves, so that their states would get into each other's way.
        state = self._forward_chunk_states.pop(fwd_chunk_id)
        if not self.is_last:
            state.input_values.clear()
            self._to_send[fwd_chunk_id] = state
        return output

    @contextmanager
    def _without_head(self) -> Iterator[None]:
        """Logits are made in backward passes only; where the loss makes them the model does not anyway."""
        model: Any = self.submod
        skips, model._skip_lm_head = model._skip_lm_head, True
        try:
            yield
        finally:
            model._skip_lm_head = skips

    def begin_backward(self, place: int) -> Tensor:
        """The stage's output for a backward micro-batch, of which only the last stage's is a value.

        Its backward pass has to come next.
        """
        assert self.passes is not None
        one = self.passes[place]
        self._begin("backward", place)
        self._layers.backward = one.regrouping
        with self._timer.time("R", self.stage_index, place):
            output: Tensor = super(PlannedStage, self).forward_one_chunk(
                place, one.inputs, one.kwargs, save_forward_output=False
            )
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._layers.backward = None

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        if self._layers.backward is not None:
            assert self._stage_meta.inputs is not None
            (meta,) = self._stage_meta.inputs
            share = self._layers.take(0, torch.empty(meta.shape, dtype=meta.dtype, device=self.device))
            return (share.requires_grad_(),)
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        if self._layers.forward is not None:
            self._layers.keep(0, *received)
        return received

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.passes is None:
            return super().get_fwd_send_ops(fwd_chunk_id)
        states, self._forward_chunk_states = self._forward_chunk_states, self._to_send
        try:
            return super().get_fwd_send_ops(fwd_chunk_id)
        finally:
            self._forward_chunk_states = states

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        if self.passes is None:
            super().release_fwd_send_outputs(fwd_chunk_id)
        else:
            del self._to_send[fwd_chunk_id]


class RecomputingSchedule(PackFlowSchedule):
    """An order of passes whose backward passes have micro-batches of their own.

    Labels, `target_mbs`, are of these: only there the loss is computed.
    """

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self._loss_arguments = kwargs.get("target_mbs"), kwargs.get("loss_kwargs")
        return super().step(*args, **kwargs)

    def _maybe_compute_loss(self, *args: Any, **kwargs: Any) -> None:
        """A forward pass has none."""

    def _maybe_get_loss(self, stage: RecomputingStage, mb_index: int) -> Tensor | None:
        """torch asks for it before a backward pass, which begins here."""
        output = stage.begin_backward(mb_index)
        if not stage.is_last:
            return None
        targets, loss_kwargs = self._loss_arguments
        loss: Tensor = self._compute_loss(output, targets[mb_index], loss_kwargs)
        self._internal_losses.append(loss.detach())
        return loss
