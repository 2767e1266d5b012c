"""A pipeline stage whose micro-batches may all differ in length.

torch's PipelineStage infers shapes from passes of the first micro-batch and keeps them for the whole run.
These stages are told the lengths of all micro-batches before the step (docs/pipeline.md).

Shapes: L tokens of a micro-batch, D model width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from wlb_titan.runtime.compat import RecvInfo, StageMeta, TensorMeta, ensure_receives_drained
from wlb_titan.runtime.step_trace import PassTimer


@dataclass(frozen=True)
class Layout:
    """What a rank holds of the tensors of one kind: local shape (1, L / ranks, *rest)."""

    ranks: int  # that share the tokens of a micro-batch
    rest: tuple[int, ...]
    dtype: torch.dtype

    def meta(self, length: int) -> TensorMeta:
        one = torch.empty((1, length // self.ranks, *self.rest), dtype=self.dtype, device="meta")
        return TensorMeta(shape=one.shape, stride=one.stride(), dtype=one.dtype, requires_grad=False)


class PlannedStage(PipelineStage):
    """A stage of a decoder that is told the lengths of a step's micro-batches before the step.

    Args:
        tokens: layout of the first stage's input, (1, L).
        hidden: layout of what passes between stages, (1, L, D), and of its gradient.
        splits_backward: whether backward passes may run in two halves, of inputs and of weights; if not, the
            first runs it whole and the second does nothing.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        group: dist.ProcessGroup,
        tokens: Layout,
        hidden: Layout,
        timer: PassTimer,
        splits_backward: bool,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group=group)
        self._tokens, self._hidden, self._timer = tokens, hidden, timer
        self._splits_backward = splits_backward
        self.micro_batch = 0  # that of the latest pass
        self._metas: list[StageMeta] = []
        self._backward_metas: list[StageMeta] = []
        # Complete, so that torch infers nothing; the lengths that count are set before each step.
        self._user_meta = self._meta(math.lcm(tokens.ranks, hidden.ranks))
        self._runtime_validate = True  # torch's own check, which it makes only when debugging
        self.act_send_info = {0: [] if self.is_last else [stage_index + 1]}

    def set_micro_batch_lengths(self, lengths: Sequence[int], backward: Sequence[int]) -> None:
        """To be called on every stage before every step. Lengths, of micro-batches of forward and of backward
        passes, are in tokens with padding, over all context-parallel ranks."""
        ensure_receives_drained(self.args_recv_info)
        ensure_receives_drained(self.grad_recv_info)
        known = {length: self._meta(length) for length in {*lengths, *backward}}
        self._metas = [known[length] for length in lengths]
        self._backward_metas = [known[length] for length in backward]
        self.chunks = len(self._metas)
        self.args_recv_info = {i: self._received(meta) for i, meta in enumerate(self._metas)}
        self.grad_recv_info = {i: self._gradients(meta) for i, meta in enumerate(self._backward_metas)}

    def _meta(self, length: int) -> StageMeta:
        hidden = self._hidden.meta(length)
        received = dataclasses.replace(hidden, requires_grad=True)
        return StageMeta(
            inputs=(self._tokens.meta(length) if self.is_first else received,),
            outputs=(hidden,),  # the last stage's are not sent, and torch does not look at them
            input_grads=(None if self.is_first else hidden,),
            output_grads=None if self.is_last else (hidden,),
        )

    def _received(self, meta: StageMeta) -> tuple[RecvInfo, ...]:
        what = "tokens" if self.is_first else f"activations for stage {self.stage_index}"
        source = None if self.is_first else self.stage_index - 1
        return (RecvInfo(what, source, meta.inputs[0], is_root_arg=self.is_first),)

    def _gradients(self, meta: StageMeta) -> tuple[RecvInfo, ...]:
        if meta.output_grads is None:
            return ()
        what = f"gradients for stage {self.stage_index}"
        return (RecvInfo(what, self.stage_index + 1, meta.output_grads[0]),)

    # torch reads `_stage_meta`, which describes the micro-batch at hand.

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timer.time("F", self.stage_index, self._begin("forward", fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **kwargs: Any
    ) -> None:
        number = self._begin("backward", bwd_chunk_id)
        full_backward = full_backward or not self._splits_backward
        with self._timer.time("B" if full_backward else "I", self.stage_index, number):
            self._gather_parameters()
            super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if not self._splits_backward:
            return
        with self._timer.time("W", self.stage_index, bwd_chunk_id):
            self._gather_parameters()
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._stage_meta = self._backward_metas[bwd_chunk_id]
        return super().get_bwd_send_ops(bwd_chunk_id)

    def _begin(self, direction: str, chunk_id: int) -> int:
        self._stage_meta = (self._metas if direction == "forward" else self._backward_metas)[chunk_id]
        self.micro_batch = chunk_id
        return chunk_id

    def _gather_parameters(self) -> None:
        """Gathers what a forward pass or, of the last norm and the output layer, the chunked loss resharded.

        A split backward pass knows parameters by their whole tensors; others silently get no gradient.
        """
        for module in self.submod.modules() if self.has_backward else ():
            if isinstance(module, FSDPModule):
                module.unshard()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        grads, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type != "weight" and not self.is_first and grads[0] is not None:
            # A dimension of size 1 may have any stride, and torch compares strides with the description.
            grads = (grads[0].view(grads[0].shape), *grads[1:])
        return grads, groups

    # V-shaped schedules hand gradients between a rank's stages in evaluation too, where there are none.

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    # Called before the first step and between training and evaluation. Nothing is to be inferred or cleaned
    # up: torch's clean-up would drop accumulated gradients.

    def _skip(self, *args: Any, **kwargs: Any) -> None:
        pass

    _prepare_forward_infra = _prepare_backward_infra = _skip
    _pre_metadata_inference_backup = _post_metadata_inference_cleanup = _skip
