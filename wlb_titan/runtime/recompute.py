"""Backward passes with micro-batches of their own: a stage computes its forward pass again for them.

The forward pass of a micro-batch runs without autograd. It leaves its keys and values in the cache of the
step and its stage's inputs with the stage. A backward pass of other tokens puts their inputs together, runs
the stage on them with autograd, on the last stage to the loss, and then backward. So a stage is computed
twice in all, as with full activation checkpointing, whose place this takes: layers are not checkpointed
besides. In flight are a stage's inputs instead of each layer's, and what all of its layers keep is there for
the backward micro-batch at hand alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from wlb_titan.runtime.packflow import PackFlowSchedule
from wlb_titan.runtime.pipeline_stage import PlannedStage
from wlb_titan.runtime.regroup import Regrouping, gathered


@dataclass(frozen=True)
class BackwardPass:
    """What a stage computes again.

    Attributes:
        regrouping: where the stage's inputs lie.
        inputs: of the first stage: token ids.
        kwargs: the model's other arguments.
    """

    regrouping: Regrouping
    inputs: tuple[torch.Tensor, ...]
    kwargs: dict[str, Any]


class RecomputingStage(PlannedStage):
    """A stage whose backward passes may have micro-batches of their own; otherwise as `PlannedStage`.

    Attributes:
        passes: the next step's backward passes; None where they are those of forward passes.
        sharers: the ranks that share a micro-batch's hidden states; None for this one alone.
    """

    passes: Sequence[BackwardPass] | None = None
    sharers: dist.ProcessGroup | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: dict[int, torch.Tensor] = {}
        self._to_send: dict[int, Any] = {}  # states of forward passes, until their outputs are sent

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._kept.clear()
        self._to_send.clear()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.passes is None:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        with torch.no_grad(), self._without_head():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
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

    def recompute(self, place: int) -> torch.Tensor:
        """The stage's output for a backward micro-batch, with autograd. Its backward pass has to be next."""
        assert self.passes is not None
        one = self.passes[place]
        self._begin("backward", place)
        with self._timer.time("R", self.stage_index, place):
            output: torch.Tensor = super(PlannedStage, self).forward_one_chunk(
                place, one.inputs, one.kwargs, save_forward_output=False
            )
        return output

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        if self.passes is None:
            return super()._retrieve_recv_activations(fwd_chunk_id)
        if not torch.is_grad_enabled():
            (self._kept[fwd_chunk_id],) = received = super()._retrieve_recv_activations(fwd_chunk_id)
            return received
        assert self._stage_meta.inputs is not None
        (meta,) = self._stage_meta.inputs
        share = torch.zeros(meta.shape, dtype=meta.dtype, device=self.device)
        how = self.passes[fwd_chunk_id].regrouping
        with torch.no_grad():
            gathered(how, self._kept, share, self.sharers)
        for source in how.over:
            del self._kept[source]
        return (share.requires_grad_(),)

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

    def _maybe_get_loss(self, stage: RecomputingStage, mb_index: int) -> torch.Tensor | None:
        """torch asks for it before a backward pass, which is when the stage is computed again."""
        output = stage.recompute(mb_index)
        if not stage.is_last:
            return None
        targets, loss_kwargs = self._loss_arguments
        loss: torch.Tensor = self._compute_loss(output, targets[mb_index], loss_kwargs)
        self._internal_losses.append(loss.detach())
        return loss
