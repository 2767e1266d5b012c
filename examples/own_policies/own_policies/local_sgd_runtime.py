"""The half of `local_sgd` that moves tensors."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from wlb_titan.runtime.meshes import Axis


class Averaging(Axis):
    """Averages weights and the optimizer's state: after a meeting all replicas are the same."""

    _last = ()

    def before_optimizer(self, trainer):
        if self.config.outer_rate != 1 and not self._last:  # at the first step, when all are the same
            self._last = [weight.clone() for weight in local_weights(trainer)]

    @torch.no_grad()
    def after_optimizer(self, trainer, *, meets):
        if not meets:
            return
        weights = local_weights(trainer)
        for tensor in (*weights, *local_states(trainer)):
            tensor /= self.mesh.size()
            dist.all_reduce(tensor, group=self.mesh.get_group())
        for weight, last in zip(weights, self._last, strict=bool(self._last)):
            weight.copy_(last.lerp_(weight, self.config.outer_rate))

    def tensors(self):
        return self._last


def local_weights(trainer):
    """This rank's shards."""
    return [local(weight.detach()) for part in trainer.model_parts for weight in part.parameters()]


def local_states(trainer):
    """Moments, without step counters."""
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    return [local(x) for state in states for x in state.values() if isinstance(x, torch.Tensor) and x.ndim]


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
