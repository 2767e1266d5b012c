"""The asymmetric partition as torch runs it: backward passes with micro-batches of their own.

docs/slimpack.md says how ("How a step runs"). Layers are computed twice and one hidden state per layer and
token is kept, as with full activation checkpointing, which this replaces.

`dataloader.regrouped_items` says which rows go where, `gathered` moves them, and `regrouped_pipeline` takes
the place of `pipeline`.

Shape suffixes: L tokens of this rank, R rows (tokens) that are sent or received, D model width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims

from wlb_titan.packing.slim.asymmetric import TokenMoves
from wlb_titan.plan import Flow
from wlb_titan.runtime.compat import checkpoint_wrapper
from wlb_titan.runtime.pipeline.build import PackFlowSchedule, Pipeline
from wlb_titan.runtime.pipeline.stage import PlannedStage

REGROUPING = "regrouping"  # an argument of a stage


def gathered(
    moves: TokenMoves, kept: Mapping[int, Tensor], into: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    """This rank's share of a backward micro-batch. Every rank of the group has to call it.

    Args:
        kept: by forward micro-batch (1, L, D), this rank's share of a hidden state.
        into: (1, L, D), zeros, which are filled.
        group: the ranks that share a micro-batch; None for this one alone.
    """
    rows_RD = into.new_empty((0, into.shape[2]))
    if moves.sources:
        rows_RD = torch.cat([kept[source].squeeze(0) for source in moves.sources])[moves.sent]
    if group is not None:
        received_RD = into.new_empty((len(moves.places), into.shape[2]))
        dist.all_to_all_single(received_RD, rows_RD, moves.received_counts, moves.sent_counts, group=group)
        rows_RD = received_RD
    into[0, moves.places] = rows_RD
    return into


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


class RegroupedStage(PlannedStage):
    """A stage whose backward passes may have micro-batches of their own.

    `passes` has these, if any: token ids, on the first stage, and the model's other arguments. Forward passes
    leave the hidden states between layers, (1, L, D): number k is the input of the stage's layer k, and the
    last one the output of the last layer. Without `passes`, as in evaluation, layers run as always.
    """

    def __init__(self, *args: Any, sharers: dist.ProcessGroup | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.passes: Sequence[tuple[tuple[Tensor, ...], dict[str, Any]]] = ()
        self._keeping: int | None = None  # micro-batch of the forward pass under way
        self._moves: TokenMoves | None = None  # of the backward pass under way
        self._sharers = sharers
        self._kept: dict[int, dict[int, Tensor]] = defaultdict(dict)
        layers = self.submod.layers
        self._layers = len(layers)
        # What comes out of the last layer is read by a norm, if this stage has it.
        self._read = self._layers + (self.submod.norm is not None)
        for number, (name, layer) in enumerate(layers.items()):
            layers[name] = checkpoint_wrapper(layer, checkpoint_fn=partial(self._run, number))

    def clear(self) -> None:
        """Forgets what is left: micro-batches of which this rank has padding only, or all after an error."""
        self.passes = ()
        self._kept.clear()
        self._keeping = self._moves = None

    def _run(
        self, number: int, layer: Callable[..., Tensor], hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        def call(hidden: Tensor) -> Tensor:
            return layer(hidden, *args, **kwargs)

        after = number + 1
        if self._moves is not None:
            inputs = partial(self._take, number, hidden.detach()) if number else hidden.detach
            # Only the loss reads what comes out of layers; of others torch compares strides alone.
            nothing = partial(torch.empty_like, memory_format=torch.contiguous_format)
            output = partial(self._take, after) if self._layers <= after < self._read else nothing
            return _Again.apply(hidden, output, inputs, call)
        result = call(hidden)
        if self._keeping is not None and after < self._read:
            self._kept[after][self._keeping] = result
        return result

    def _take(self, number: int, like: Tensor) -> Tensor:
        """A hidden state of the backward pass under way, shaped as `like`; drops what is used up."""
        moves, kept = self._moves, self._kept[number]
        with torch.no_grad():
            hidden = gathered(moves, kept, like.new_zeros(like.shape), self._sharers)
        for source in moves.over:
            del kept[source]
        return hidden

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if not self.passes:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._keeping, self._moves = fwd_chunk_id, None
        with torch.no_grad(), self._without_head():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._keeping = None
        # torch keeps these for the micro-batch's own backward pass. The output is still to be sent; the
        # backward pass of this number overwrites it.
        self._forward_chunk_states[fwd_chunk_id].input_values.clear()
        if self.is_last:
            del self._forward_chunk_states[fwd_chunk_id]
        return output

    @contextmanager
    def _without_head(self) -> Iterator[None]:
        """Skips logits, which only backward passes need."""
        model = self.submod
        skips, model._skip_lm_head = model._skip_lm_head, True
        try:
            yield
        finally:
            model._skip_lm_head = skips

    def _begin(self, direction: str, chunk_id: int) -> int:
        # The plan numbers micro-batches of backward passes after those of forward passes.
        super()._begin(direction, chunk_id)
        self.micro_batch += len(self.passes) if direction == "backward" else 0
        return self.micro_batch

    def begin_backward(self, place: int) -> Tensor:
        """The stage's output, with values only on the last stage; the backward pass has to come next."""
        inputs, kwargs = self.passes[place]
        kwargs = dict(kwargs)
        self._moves = kwargs.pop(REGROUPING)
        with self._timer.time("R", self.stage_index, self._begin("backward", place)):
            return super(PlannedStage, self).forward_one_chunk(
                place, inputs, kwargs, save_forward_output=False
            )

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        if self._moves is not None:
            (meta,) = self._stage_meta.inputs
            share = self._take(0, torch.empty(meta.shape, dtype=meta.dtype, device=self.device))
            return (share.requires_grad_(),)
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        if self._keeping is not None:
            (self._kept[0][self._keeping],) = received
        return received


class RegroupedSchedule(PackFlowSchedule):
    """An order of passes whose backward passes have micro-batches of their own.

    `step` takes those of forward passes first. Only backward passes have a loss. torch numbers both from 0.
    """

    def __init__(self, stages: Sequence[PlannedStage], flow: Flow, loss_fn: Callable[..., Any]) -> None:
        ahead = sum(action.kind == "F" and action.stage == flow[0][0].stage for action in flow[0])
        numbered = tuple(
            tuple(a if a.kind == "F" else a._replace(place=a.place - ahead) for a in actions)
            for actions in flow
        )
        super().__init__(stages, numbered, loss_fn)

    def step(
        self,
        *,
        arg_mbs: list[tuple[Tensor, ...]] | None,
        kwarg_mbs: list[dict[str, Any]],
        target_mbs: list[Tensor] | None,
        **others: Any,
    ) -> Any:
        n = self._n_microbatches
        self._loss_arguments = target_mbs and target_mbs[n:], others.get("loss_kwargs")
        inputs = arg_mbs[n:] if arg_mbs else [()] * n
        for stage in self._stages:
            stage.passes = list(zip(inputs, kwarg_mbs[n:], strict=True))
        try:
            return super().step(
                arg_mbs=arg_mbs and arg_mbs[:n],
                kwarg_mbs=kwarg_mbs[:n],
                target_mbs=target_mbs and target_mbs[:n],
                **others,
            )
        finally:
            for stage in self._stages:
                stage.clear()

    def _maybe_compute_loss(self, *args: Any, **kwargs: Any) -> None:
        """A forward pass has none."""

    def _maybe_get_loss(self, stage: RegroupedStage, mb_index: int) -> Tensor | None:
        """torch asks for it before a backward pass, which begins here."""
        output = stage.begin_backward(mb_index)
        if not stage.is_last:
            return None
        targets, loss_kwargs = self._loss_arguments
        loss = self._compute_loss(output, targets[mb_index], loss_kwargs)
        self._internal_losses.append(loss.detach())
        return loss


def regrouped_pipeline(made: Callable[..., Pipeline], model: nn.Module, **arguments: Any) -> Pipeline:
    """A pipeline as `made` makes it, with layers computed again in place of full checkpointing."""
    group = sharers(arguments["parallel_dims"], arguments["parallelism"])
    arguments |= {"ac_config": None, "stage_class": partial(RegroupedStage, sharers=group)}
    return made(model, flow_class=RegroupedSchedule, **arguments)


def sharers(parallel_dims: ParallelDims, parallelism: ParallelismConfig) -> dist.ProcessGroup | None:
    """The ranks that share the hidden states of a micro-batch; None if this one has all."""
    tensor = parallel_dims.tp if parallelism.enable_sequence_parallel else 1
    names = [name for name, ranks in (("cp", parallel_dims.cp), ("tp", tensor)) if ranks > 1]
    if not names:
        return None
    mesh = parallel_dims.get_mesh(names)
    return mesh.get_group() if len(names) == 1 else mesh._flatten("hidden_states").get_group()
