"""Validation on all documents that are held out of training, or of another corpus, once.

`wlb_titan.packing.once` packs them (docs/sft.md). The loss is that of one step over all of them, and does not
depend on packing or parallelism, except for documents above the context window, which are cut there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torchtitan.components import validate as titan
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger

from wlb_titan.config.documents import validated_documents
from wlb_titan.config.settings import WlbSettings
from wlb_titan.packing.once import validating
from wlb_titan.runtime.dataloader import Item, PlannedDataLoader, Step, grouped


class Validator(titan.BaseValidator):
    """Validates after the first step, every `validation.every` steps and after the last. torchtitan's trainer
    builds it; ours then calls `prepare`."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Validator.Config):
        """Filled in by the trainer from [wlb.validation]."""

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config)
        self._parts = parts
        self._sources: dict[str, tuple[PlannedDataLoader, Iterator[Step]]] = {}
        self.goes_on: Callable[[], bool] = lambda: True  # before each step, as of `Trainer.train`

    def prepare(
        self, wlb: WlbSettings, training: PlannedDataLoader.Config, last_step: int, device: torch.device
    ) -> None:
        """Packs the documents for loaders like that of training."""
        self._last, self._device = last_step, device
        job = validating(training.job)
        corpus, sources = validated_documents(wlb, training.corpus)
        for name, documents in sources.items():
            settings = dataclasses.replace(training, corpus=corpus, documents=documents, job=job)
            loader = PlannedDataLoader(settings)
            self._sources[name] = loader, iter(loader)

    def should_validate(self, step: int) -> bool:
        return super().should_validate(step) or step == self._last

    def close(self) -> None:
        for loader, _ in self._sources.values():
            loader.close()

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Goes once through all documents and reports the losses, unless the run is to end before. Its time
        does not count for steps."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        begin, metrics = time.perf_counter(), self._parts["metrics_processor"]
        count = sum(loader.count for loader, _ in self._sources.values())
        logger.info(f"Validating on {count:,} documents")
        for part in model_parts:
            part.eval()
        losses: dict[str, float] = {}
        total = labels = 0.0
        for name, source in self._sources.items():
            sums = self._validated(*source, model_parts)
            if sums is None:
                break
            loss, weight = sums
            losses[f"validation_loss/{name}"] = loss / max(weight, 1e-9)
            total, labels = total + loss, labels + weight
        for part in model_parts:
            part.train()
            # The chunked loss without backward leaves FSDP within a forward pass: in the next, the head's
            # gradients would be reduced last, where replicas that run slices in other orders are elsewhere.
            part.reset_iter_state()
        if sums is None:
            logger.info(f"Validation after step {step} cut short: the run ends, and there is no result.")
            return
        metrics.log_validation(total / max(labels, 1e-9), step, losses if len(losses) > 1 else {})
        metrics.time_last_log += time.perf_counter() - begin

    def _validated(
        self, loader: PlannedDataLoader, steps: Iterator[Step], model_parts: list[nn.Module]
    ) -> tuple[float, float] | None:
        """A source's sums over all ranks: of its losses, and of its labels. None if the run is to end."""
        run = self._parts["local_batch_size"] if self._parts["pp_schedule"] is not None else 1
        mine = torch.zeros((), device=self._device)
        labels = 0.0
        for step in islice(steps, loader.policy.steps):
            if not self.goes_on():
                return None
            labels += step.labels
            for group in grouped(step.items, run):
                mine += self._loss(group, model_parts)
        mesh = self._parts["parallel_dims"].get_optional_mesh("loss")
        return dist_utils.dist_sum(mine, mesh), labels

    def _loss(self, group: Sequence[Item], model_parts: list[nn.Module]) -> torch.Tensor:
        """The sum of this rank's losses in a group; 0 if it does not have the last stage."""
        moved = [item.to(self._device) for item in group]
        schedule = self._parts["pp_schedule"]
        with self._parts["validation_context"]():
            if schedule is None:
                ((inputs, targets, extra),) = moved
                loss, _ = self._parts["loss_fn"](model_parts[0](inputs, **extra), targets)
                return loss.detach()
            return schedule.step(moved, labels=None)
