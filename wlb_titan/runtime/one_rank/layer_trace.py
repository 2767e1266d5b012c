"""What a model's layers keep, compute and send, told by the model itself: a dry run of one layer of each
(docs/dryrun.md, "Layers that no formula knows").
"""

from __future__ import annotations

import copy
import gc
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchtitan.models.common.moe import RoutedExperts

from wlb_titan.config.settings import CorpusSettings, WlbSettings
from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.cluster import UNKNOWN
from wlb_titan.cost.told import LayerAccount, ModelAccount, Shape, Weights
from wlb_titan.dimensions.dimension import TORCHTITAN
from wlb_titan.memory.layer import token_bytes
from wlb_titan.plan import MicroBatch
from wlb_titan.prepare.prepare import write_synthetic_corpus
from wlb_titan.runtime.accounts import words_of
from wlb_titan.runtime.dataloader import Item
from wlb_titan.runtime.models.checkpointing import mixable
from wlb_titan.runtime.one_rank.dry_run import DryTrainer, gathered_shape
from wlb_titan.runtime.one_rank.dry_trace import bytes_of
from wlb_titan.runtime.one_rank.layer_log import NAMES, LayerLog, Slopes
from wlb_titan.runtime.trainer import Trainer

TOKENS = 1024  # of a context-parallel rank in the shorter trace, at least
ROUTED = 1.5  # times its share, which this rank's experts get in a third trace
FIRST, LAST = ("tok_embeddings",), ("norm", "lm_head")  # modules of a model beside its layers


def in_shape(
    config: Trainer.Config, corpus: str, shape: Shape, numbers: Sequence[int]
) -> tuple[Trainer.Config, int]:
    """A job of which rank 0 has each different layer once for each kind of recomputation, and its processes.
    What it lacks of the whole job changes nothing in a layer."""
    model = copy.deepcopy(config.model_spec.model)
    different = [model.layers[numbers.index(number)] for number in range(max(numbers) + 1)]
    model.layers = [copy.deepcopy(layer) for layer in different for _ in NAMES]
    sharing = shape.tensor * shape.context
    data = shape.expert // math.gcd(shape.expert, sharing)
    degrees = {cls.key: 1 for cls in TORCHTITAN.values()} | {
        "data_parallel_shard_degree": data,
        "tensor_parallel_degree": shape.tensor,
        "context_parallel_degree": shape.context,
        "expert_parallel_degree": shape.expert,
    }
    context = config.wlb.context
    if shape.attention not in ("", context.owner.attention) or context.owner.automatic:
        named = (STRATEGIES.configure(name, profile=context.profile) for name in STRATEGIES.candidates)
        context = next(one for one in named if one.owner.attention == shape.attention)
    changed = replace(
        config,
        model_spec=replace(config.model_spec, model=model),
        parallelism=replace(config.parallelism, **degrees),
        training=replace(config.training, local_batch_size=1, global_batch_size=-1),
        activation_checkpoint=mixable(config.activation_checkpoint),
        wlb=WlbSettings(
            corpus=CorpusSettings(path=corpus),
            context=context,
            attention=config.wlb.attention,
            cluster=config.wlb.cluster or UNKNOWN,
        ),
    )
    return changed, sharing * data


class LayerTracer(DryTrainer):
    """Takes the account of the job's layers on rank 0 in a `Shape`."""

    def __init__(self, config: Trainer.Config, *, rank: int, world_size: int, shape: Sequence[Any]) -> None:
        layers = list(map(words_of, config.model_spec.model.layers))
        self._numbers = tuple(map(list(dict.fromkeys(layers)).index, layers))  # of each layer's configuration
        self._folder = tempfile.TemporaryDirectory()
        corpus = write_synthetic_corpus(Path(self._folder.name) / "corpus", np.full(4096, 2))
        changed, world_size = in_shape(config, str(corpus.path), Shape(*shape), self._numbers)
        os.environ["WORLD_SIZE"] = str(world_size)
        super().__init__(changed, rank=rank, world_size=world_size, device_bytes=1e15)

    def run(self) -> dict[str, Any]:
        return {"account": asdict(self.account())}

    def account(self) -> ModelAccount:
        """Traces steps of two lengths; a step for what FSDP does once comes first."""
        degrees, divisor, size = self.job.degrees, self.job.divisor, self.job.memory.compute_bytes
        tokens = -(-TOKENS * degrees.context // divisor) * divisor
        self._traced(tokens)
        short, long = self._traced(tokens), self._traced(2 * tokens)
        by_token = Slopes(short, long, tokens, size)
        (model,) = self.model_parts
        dispatchers = [m.token_dispatcher for m in model.modules() if isinstance(m, RoutedExperts)]
        by_routed = None
        if degrees.expert > 1 and dispatchers:
            for dispatcher in dispatchers:
                dispatcher.share = ROUTED
            uneven = self._traced(2 * tokens)
            by_routed = Slopes(long, uneven, 2 * tokens * (ROUTED - 1), size)
        window = self.config.training.seq_len
        different = []
        for place, layer in list(enumerate(model.layers.values()))[:: len(NAMES)]:
            different.append(
                LayerAccount(
                    weights=weights_of([layer], window),
                    work=by_token.of_layer(place, self._axes),
                    uneven=by_routed and by_routed.of_layer(place, self._axes, by_token),
                )
            )
        first, last = ([getattr(model, name) for name in names] for names in (FIRST, LAST))
        return ModelAccount(
            layers=tuple(different),
            numbers=self._numbers,
            embedded=max(by_token.left("start") - token_bytes(self.job).hidden, 0.0),
            loss=by_token.of_loss(token_bytes(self.job).hidden_gathered),
            ends=(weights_of(first, window), weights_of(last, window)),
        )

    def _traced(self, length: int) -> LayerLog:
        """A step of one document of so many tokens, in one micro-batch."""
        job = self.job
        documents = np.array([[0, 0, length, 0, 0]], dtype=np.int64)
        (micro_batch,) = job.sharded([MicroBatch(documents, length=length)])
        if job.strategy is not None:  # with copies, even where "auto" would take one group
            micro_batch = replace(micro_batch, groups=max(job.strategy.groups))
        zeros, positions = np.zeros(length, dtype=np.int64), np.arange(length)
        item = Item.of(micro_batch, job, self.parallel_dims.place("cp"), zeros, zeros, positions)
        (model,) = self.model_parts
        kinds = tuple(NAMES) * (len(model.layers) // len(NAMES))
        item = replace(item, mask=replace(item.mask, kinds=kinds))
        log = LayerLog(self._fake, (*model.parameters(), *model.buffers()))
        hooks = self._hooks(log)
        gc.collect()
        gc.disable()  # or what a cycle holds would be gone at another operation
        try:
            with log, self._fake:
                log.mark("start")
                Trainer.forward_backward(self, [item], torch.ones(()))
                log.mark("end")
        finally:
            gc.enable()
            for hook in hooks:
                hook.remove()
            self.optimizers.zero_grad()
        return log

    def _hooks(self, log: LayerLog) -> list[Any]:
        """They mark where each layer's passes begin, ahead of FSDP's own, which fetch weights."""
        (model,) = self.model_parts

        def before(number: int, _: Any, args: tuple[Any, ...]) -> None:
            log.mark(f"F{number}")
            if number == 0 and args[0].requires_grad:
                args[0].register_hook(partial(log.mark, "ends"))

        def after(number: int, _: Any, args: Any, output: torch.Tensor) -> None:
            output.register_hook(partial(log.mark, f"B{number}"))

        hooks = []
        for number, layer in enumerate(model.layers.values()):
            hooks.append(layer.register_forward_pre_hook(partial(before, number), prepend=True))
            hooks.append(layer.register_forward_hook(partial(after, number), prepend=True))
        return [*hooks, layer.register_forward_hook(partial(log.mark, "loss"))]


def weights_of(modules: Sequence[nn.Module], window: int) -> Weights:
    parameters = [p for module in modules for p in module.parameters()]
    inside = [inner for module in modules for inner in module.modules()]
    experts = [p for inner in inside if isinstance(inner, RoutedExperts) for p in inner.parameters()]

    def mine(chosen: Iterable[torch.Tensor]) -> int:
        return sum(math.prod(gathered_shape(p)) for p in chosen)

    trained = [p for p in parameters if p.requires_grad]
    return Weights(
        all=sum(p.numel() for p in parameters),
        gathered=mine(parameters),
        trained=sum(p.numel() for p in trained),
        gradients=mine(trained),
        matrix=max((mine([p]) for p in trained), default=0),
        experts=mine(experts),
        tables=bytes_of(b for module in modules for b in module.buffers()) / window,
    )
