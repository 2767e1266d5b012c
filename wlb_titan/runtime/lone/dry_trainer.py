"""The trainer of a dry run: one rank, fake tensors, a fake process group, one step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torchtitan.distributed import utils as dist_utils

from wlb_titan.errors import UserError
from wlb_titan.memory.rank import GIB
from wlb_titan.packing.predicted import travelling
from wlb_titan.plan import Action
from wlb_titan.runtime.attention.kv_cache import KeyValueCache
from wlb_titan.runtime.compat import DataDependentOutputException, FakeTensorMode
from wlb_titan.runtime.data.inputs import Item
from wlb_titan.runtime.lone.calls import CallLog, of_rank
from wlb_titan.runtime.lone.dry_model import AttentionOfSlices, dry_config
from wlb_titan.runtime.lone.memory_trace import MemoryTrace
from wlb_titan.runtime.lone.trainer import LoneTrainer
from wlb_titan.runtime.trainer import Trainer


class DryTrainer(LoneTrainer):
    """One rank of a job, built as the job builds it, on tensors without memory.

    The model is made on the meta device and parallelised as ever; what comes after is done in a fake mode:
    the parameters' allocation, the optimizer, the step.

    Args:
        config: of the job. Compilation, checkpoints and files are switched off in a copy.
        device_bytes: memory of a GPU, which bounds plans; None is that of the configured cluster.
    """

    def __init__(
        self, config: Trainer.Config, *, rank: int, world_size: int, device_bytes: float | None = None
    ) -> None:
        self._device_bytes = device_bytes
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._trace = MemoryTrace(self._fake)
        self._passes, self._passes_peak = self._trace.peak, 0
        with ExitStack() as stack:
            changed = dry_config(config, lambda: stack.enter_context(self._fake))
            super().__init__(changed, rank=rank, world_size=world_size)

    def start_group(self) -> None:
        """One that answers at once."""
        dist_utils.init_fake_mode(self._world_size, rank=self._rank)
        if self._device_bytes is not None:
            self.job = self.job.on(replace(self.job.cluster, memory=self._device_bytes))

    def run(self, step: int) -> dict[str, Any]:
        """Runs one step of the plan.

        Args:
            step: from 1; the plans before it are made and left out.

        Returns:
            What `wlb-titan dryrun --output` writes of a rank; see docs/dryrun.md.

        Raises:
            UserError: the step needs more than shapes.
        """
        begin = time.perf_counter()
        planned, self.step = next(self._steps(step)), step
        mine = planned.plan.of_rank(self._replica)
        lengths = [m.length for m in mine]
        parameters = [p for part in self.model_parts for p in part.parameters()]
        buffers = [b for part in self.model_parts for b in part.buffers()]
        calls = CallLog(lambda: self.timer.latest)
        trace = self._trace = MemoryTrace(self._fake, _weight_shapes(parameters), calls)
        for term, tensors in (("weights", parameters), ("rotary", buffers)):
            for tensor in tensors:
                trace.add(tensor, term)
        with trace:
            trace.begin()
            try:
                self.train_step(iter([planned]))
            except DataDependentOutputException as error:
                raise UserError(
                    "The model was built and parallelised without an error, but its step depends on values "
                    f"of tensors, and a dry run has only their shapes: {error}."
                ) from error
        passes = self._passes
        states = [
            value
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        trace.reassign(states, "optimizer")
        trace.reassign(self.axes.tensors(), "dimensions")
        # What is made behind the passes of the first step is there in all passes of the next.
        beside = {term: trace.now().terms.get(term, 0) for term in ("optimizer", "dimensions")}
        passes.terms.update({term: bytes_ for term, bytes_ in beside.items() if bytes_})
        return {
            **self._facts(),
            "lengths": lengths,
            "travelling": [list(travelling(m, self.job.merged[m.sharers])) for m in mine],
            "traced_gib": max(self._passes_peak + sum(beside.values()), trace.highest) / GIB,
            "traced": {term: size / GIB for term, size in passes.terms.items()},
            "largest": [
                {"gib": size / GIB, "tensors": number, "what": what} for size, number, what in passes.largest
            ],
            **self._predicted(planned.plan),
            "collectives": self._collectives(calls.collectives),
            "calls": of_rank(calls.calls).to_json(),
            "seconds": time.perf_counter() - begin,
        }

    def forward_backward(
        self,
        group: Sequence[Item],
        labels: torch.Tensor,
        cache: KeyValueCache | None = None,
        lowered: Any = None,
    ) -> torch.Tensor:
        with self._traced_passes(cache):
            return super().forward_backward(group, labels, cache, lowered)

    def run_alone(
        self, items: list[Item], actions: Sequence[Action], labels: torch.Tensor, cache: KeyValueCache
    ) -> torch.Tensor:
        with self._traced_passes(cache):
            return super().run_alone(items, actions, labels, cache)

    @contextmanager
    def _traced_passes(self, cache: KeyValueCache | None) -> Iterator[None]:
        """The passes, in the fake mode, which the optimizer has to do without: in an active one DTensor would
        work out shapes on tensors of the rank's own mode, and the trace would count them.

        Their peak is kept, and another one begins behind them.
        """
        with self._fake, AttentionOfSlices(cache, self._trace):
            yield
        if self._trace.highest > self._passes_peak:
            self._passes, self._passes_peak = self._trace.peak, self._trace.highest
        gradients = (p.grad for part in self.model_parts for p in part.parameters() if p.grad is not None)
        self._trace.reassign(gradients, "gradients")
        self._trace.begin()


def _weight_shapes(parameters: Iterable[torch.Tensor]) -> Iterator[tuple[int, ...]]:
    """Shapes of the whole weights that tensor parallelism leaves a rank."""
    for parameter in parameters:
        shape = list(parameter.shape)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for axis, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True):
                if axis in ("tp", "ep") and isinstance(placement, Shard):
                    shape[placement.dim] //= mesh[axis].size()
        if len(shape) > 1:
            yield tuple(shape)
