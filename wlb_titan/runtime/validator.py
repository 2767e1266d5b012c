"""Validation on documents of one's own: those held out of training, or another corpus, once and whole.

They are packed by `runtime.once`: balanced like those of training, with the same sharding and label masks,
and nothing waits. The loss is that of a step over all of them, so it does not depend on packing or
parallelism but for documents above the context window, which are cut there. Of a mixture each source has a
round of its own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchtitan.components import validate as titan
from torchtitan.distributed import utils as dist_utils

from wlb_titan.config.settings import CorpusSettings, WlbSettings
from wlb_titan.corpus import Corpus
from wlb_titan.documents import Documents
from wlb_titan.documents.mixture import Divided
from wlb_titan.errors import PlanError, UserError
from wlb_titan.pipeline.order import ORDERS
from wlb_titan.runtime.data.corpus import mixture_sources, open_corpus
from wlb_titan.runtime.data.dataloader import PlannedDataLoader, Step
from wlb_titan.runtime.data.inputs import Item, grouped, to_device
from wlb_titan.runtime.once import Once

if TYPE_CHECKING:
    from wlb_titan.runtime.trainer import Trainer


def rounds_of(settings: WlbSettings) -> tuple[CorpusSettings, dict[str, Documents]]:
    """What [wlb.validation] asks for: the corpus, and by the name of each source what it is validated on.

    Where there is one source only its name is empty.
    """
    validation = settings.validation
    if validation.path:
        corpus_settings = dataclasses.replace(
            settings.corpus, path=validation.path, mask=validation.mask, sources=[]
        )
        corpus = open_corpus(corpus_settings)
        return corpus_settings, {"": _documents(corpus, corpus.lengths)}
    corpus = open_corpus(settings.corpus)
    sources = mixture_sources(settings.corpus, corpus)
    rounds, first = {}, 0
    for name, count in [(source.name, source.documents) for source in sources] or [("", len(corpus))]:
        rows = range(first, first + count)
        held = Divided(corpus.lengths, validation.hold_out, held_out=True, rows=rows)
        rounds[name] = _documents(corpus, held)
        first += count
        try:
            rounds[name].mixture()
        except PlanError as error:
            raise UserError(
                f"wlb.validation.hold_out: of the {count:,} documents of {name or corpus} none with a token "
                "to predict is held out; raise it, or name other documents with wlb.validation.path."
            ) from error
    return settings.corpus, rounds


def _documents(corpus: Corpus, lengths: Any) -> Documents:
    return Documents(lengths=lengths, name=str(corpus), seed=None, learned=corpus.count_learned)


class Validator(titan.BaseValidator):
    """Validates after the first step, every `validation.every` steps and after the last. The trainer builds
    it, and calls `prepare` when it knows its ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Validator.Config):
        """Filled in by the trainer from [wlb.validation]."""

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config)
        self._parts = parts
        self._last = 0
        self._rounds: list[tuple[str, PlannedDataLoader, Iterator[Step], int]] = []

    def prepare(self, trainer: Trainer) -> None:
        """Packs the documents."""
        config, job = trainer.config, trainer.job
        self._last = config.training.steps
        self._device = trainer.device
        once = dataclasses.replace(
            job,
            packing=Once.Config(length_multiple=job.packing.length_multiple),
            order=ORDERS.configure("as_packed"),
            micro_batches=job.degrees.data * (job.run or 1),
        )
        corpus, rounds = rounds_of(config.wlb)
        for name, documents in rounds.items():
            loader = dataclasses.replace(
                config.dataloader,
                corpus=corpus,
                job=once,
                shadow=None,
                hold_out=0.0,
                documents=documents,
            ).build(dp_world_size=job.degrees.data, dp_rank=self._parts["dp_rank"])
            self._rounds.append((name, loader, iter(loader), loader.policy.steps))

    def should_validate(self, step: int) -> bool:
        return super().should_validate(step) or step == self._last

    def close(self) -> None:
        """Ends the loaders' threads."""
        for _, loader, _, _ in self._rounds:
            loader.close()

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """One round through all documents, in evaluation mode; the metrics get the losses, and its time is
        none of the steps' between which it lies."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        begin, metrics = time.perf_counter(), self._parts["metrics_processor"]
        for part in model_parts:
            part.eval()
        mesh = self._parts["parallel_dims"].get_optional_mesh("loss")
        losses: dict[str, float] = {}
        total = labels = 0.0
        run = self._parts["local_batch_size"] if self._parts["pp_schedule"] is not None else 1
        for name, _, served, steps in self._rounds:
            own = torch.zeros((), device=self._device)
            weight = 0.0
            for _ in range(steps):
                serving = next(served)
                weight += serving.labels
                for group in grouped(serving.items, run):
                    own += self._loss(group, model_parts)
            loss = dist_utils.dist_sum(own, mesh) if mesh is not None else float(own)
            losses[f"validation_loss/{name}"] = loss / max(weight, 1e-9)
            total, labels = total + loss, labels + weight
        for part in model_parts:
            part.train()
        extra = losses if len(losses) > 1 else None
        metrics.log_validation(total / max(labels, 1e-9), step, extra)
        metrics.time_last_log += time.perf_counter() - begin

    def _loss(self, group: Sequence[Item], model_parts: list[nn.Module]) -> torch.Tensor:
        """The sum of the losses of this rank's part of a group; 0 where it has no last stage."""
        moved = [to_device(item, labels, self._device) for item, labels in group]
        schedule = self._parts["pp_schedule"]
        with self._parts["validation_context"]():
            if schedule is None:
                ((inputs, targets, extra),) = moved
                loss, _ = self._parts["loss_fn"](model_parts[0](inputs, **extra), targets)
                return loss.detach()
            loss: torch.Tensor = schedule.eval(moved)
            return loss
