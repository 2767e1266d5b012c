"""torchtitan's trainer on planned micro-batches.

A micro-batch is one packed sequence, so the batch dimension is always 1. A step of the whole job has
`global_batch_size` micro-batches (or local_batch_size x data-parallel degree), whatever the parallelism. A
rank's `local_batch_size` micro-batches go through a pipeline together; without one they go one by one.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.config as dist_config
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer as TorchtitanTrainer

from wlb_titan.config.documents import open_corpus, training_documents
from wlb_titan.corpus import Corpus
from wlb_titan.job import Job
from wlb_titan.plan import Action, Flow
from wlb_titan.runtime.agreement import agreed_beginning, agreed_job, set_timeouts, timeout
from wlb_titan.runtime.attention.implementation import compile_attention
from wlb_titan.runtime.attention.kv_cache import KeyValueCache
from wlb_titan.runtime.attention.module import DocumentAttention, prepare_attention
from wlb_titan.runtime.checkpoints import Finite, save_stopped, saves
from wlb_titan.runtime.config import TrainerConfig
from wlb_titan.runtime.configured import job_of, parallel_dims
from wlb_titan.runtime.cpu_device import add_up_by_sums
from wlb_titan.runtime.dataloader import Item, PlannedDataLoader, Step, grouped
from wlb_titan.runtime.experts import ExpertLoad
from wlb_titan.runtime.hugging_face import begin_export, complete_export, drop_router_bias, export_files
from wlb_titan.runtime.loss import weighted
from wlb_titan.runtime.memory import measured_memory
from wlb_titan.runtime.meshes import Axis, Dims, Made, context_meshes, meets, own_axes
from wlb_titan.runtime.models.checkpointing import counted_once
from wlb_titan.runtime.models.compiling import prepare_compiling
from wlb_titan.runtime.models.weights import build_optimizers, parallelized
from wlb_titan.runtime.pipeline.build import Moved, PackFlowSchedule
from wlb_titan.runtime.pipeline.regroup import regrouped_pipeline
from wlb_titan.runtime.step_trace import PassTimer, StepTrace
from wlb_titan.runtime.validator import Validator


class Trainer(TorchtitanTrainer):
    """Trains on a prepared corpus under the packing and sharding policies of `config.wlb`."""

    Config = TrainerConfig

    job: Job
    dataloader: PlannedDataLoader

    def __init__(self, config: TrainerConfig, corpus: Corpus | None = None) -> None:
        self.corpus = open_corpus(config.wlb.corpus) if corpus is None else corpus
        self.documents = training_documents(config.wlb, self.corpus)
        self.job = job_of(config, parallel_dims(config, int(os.environ["WORLD_SIZE"])))
        self.axes: list[Axis] = []  # filled once there are meshes, before the model is divided
        config = with_our_parts(config, self.job, self.axes, str(self.corpus.tokenizer_path))
        self._made: Made = {}
        self._export: tuple[Path, dict[str, bytes]] | None = None  # of rank 0, at the last step
        super().__init__(config)
        self._reduces = True
        self.finite = Finite(self.device)
        self.timer = self.pp_schedule.timer if self.parallel_dims.pp_enabled else PassTimer(self.device)
        writer = self.metrics_processor.rank
        self.step_trace = StepTrace(self.timer, config.wlb.trace_every, config.dump_folder, writer)
        self.expert_load = ExpertLoad(self.job.model, self.model_parts, self.parallel_dims, self.device)
        if config.compile.enable:
            prepare_compiling(self.job)
        prepare_attention(self.model_parts, self.job, self._meshes)
        if self.device.type == "cpu":
            add_up_by_sums(self.model_parts)
        if config.validator.enable:
            self.validator.prepare(config.wlb, config.dataloader, config.training.steps, self.device)

    def init_distributed(self) -> ParallelDims:
        """Starts the process groups and settles the job, before anything is built from it."""
        world_size = dist_utils.init_distributed(
            self.config.comm,
            enable_cpu_backend=self.config.training.enable_cpu_offload,
            base_folder=self.config.dump_folder,
        )
        dist_config.pipeline_per_edge_p2p = True  # otherwise a send waits behind receives from other ranks
        dims = parallel_dims(self.config, world_size)
        self.beginning = agreed_beginning(self.config)
        self.job = agreed_job(self.config, self.job, self.documents)
        self.set_up(dims)
        return dims

    def set_up(self, dims: Dims) -> None:
        """Makes the meshes, and the settings that follow from the job and this rank's place."""
        config, wlb = self.config, self.config.wlb
        dims.build_mesh()
        self.axes += own_axes(dims)
        self._meshes = context_meshes(self.job, dims, self._made)
        config.comm.train_timeout_seconds = timeout(config, self.job)
        config.dataloader = PlannedDataLoader.Config(
            corpus=self.corpus,
            documents=self.documents,
            job=self.job,
            rank=dist.get_rank(),
            loss_weight=wlb.loss_weight,
        )

    def train(
        self,
        begin: Callable[[int], None] = lambda step: None,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Trains until the last step, or until all ranks were asked to stop; returns whether all is done.
        `begin` gets the loaded checkpoint's step, or 0; `goes_on` says before each step, also of a
        validation, whether it follows. torchtitan's own command gives neither."""
        self._begin, self._goes_on = begin, goes_on
        if self.config.validator.enable:
            self.validator.goes_on = goes_on
        # A disk may be slow: not for the group that writes checkpoints.
        set_timeouts(self.config.comm.train_timeout_seconds, without=getattr(self.checkpointer, "pg", None))
        logger.info(f"Corpus {self.corpus}: {self.dataloader.count:,} documents to train on")
        logger.info(f"Activations: {self.job.checkpointing}")
        compile_attention(self.config, self.job, self.device)
        checkpoint = self.config.checkpoint
        exports = checkpoint.enable and not checkpoint.load_only and checkpoint.last_save_in_hf
        if exports and dist.get_rank() == 0:
            folder = Path(self.config.dump_folder) / checkpoint.folder / f"step-{self.config.training.steps}"
            self._export = folder, export_files(self.config, self.corpus)
        super().train()
        self.step_trace.close()
        if self.step < self.config.training.steps:
            return False
        if self._export:
            complete_export(self._export[0])
        self.metrics_processor.tell_end(self.step, self._began if self.dataloader.plan else None)
        return True

    def batch_generator(self, data_iterable: PlannedDataLoader) -> Iterator[Step]:
        """The loader's steps."""
        self._first_step, self._began = self.step + 1, time.monotonic()
        self.metrics_processor.last_step = self.config.training.steps
        for scheduler in self.lr_schedulers:  # at the step that was loaded
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
        self._begin(self.step)
        return data_iterable.steps(self.lower)

    def should_continue_training(self) -> bool:
        if not super().should_continue_training():
            return False
        if self._goes_on():
            return True
        for axis in self.axes:  # those that did not meet in this step: the run ends before its last one
            axis.after_optimizer(self, meets=not meets(self, axis.every))
        self.finite.check(self, saves=True)
        saved = save_stopped(self.checkpointer, self.step, new=self.step >= self._first_step)
        logger.info(f"Stopped after step {self.step} of {self.config.training.steps}: {saved}.")
        return False

    def to_device(self, item: Item, cache: KeyValueCache | None = None) -> Moved:
        self.ntokens_seen += item.labels.shape[1]  # 0 if only the backward pass has labels
        return item.to(self.device, cache.number if cache is not None else None)

    def train_step(self, data_iterator: Iterator[Step]) -> None:
        """One optimizer step, of parts that a subclass may replace: `gradients`, `update` and `report`.

        It waits for the device only if it is logged or traced. torchtitan's waits at each copy, and asks all
        ranks for the number of labels, which the plan knows.
        """
        self.step_trace.begin(self.step)
        begin = time.perf_counter()
        with self.timer.time("loading"):
            step = next(data_iterator)
        self.metrics_processor.data_loading_times.append(time.perf_counter() - begin)
        logs = self.metrics_processor.should_log(self.step)
        if logs:
            self.expert_load.begin()
        learning_rates = self.lr_schedulers.get_metrics()
        loss = self.gradients(step)
        if logs:
            self.expert_load.end()
        with self.timer.time("optimizer"):
            grad_norm = self.update()
        self.finite.note(self.step, loss, grad_norm)
        self.metrics_processor.count(step.plan.tokens, step.flops)
        last = self.step == self.config.training.steps
        saved = saves(self.checkpointer, self.step, last)
        if logs or saved:
            self.finite.check(self, saves=saved)
        if logs:
            self.report(step, loss, grad_norm, learning_rates)
        self.step_trace.end(self.step, step.plan, self.job)  # if the step was not logged
        if self._export and last:
            begin_export(*self._export)  # torchtitan saves the weights next

    def gradients(self, step: Step) -> torch.Tensor:
        """All passes of a step, and the reduction of gradients; returns this rank's part of the loss."""
        self.optimizers.zero_grad()
        self.timer.first = 0
        # Without a learned token, loss and gradients are 0, not 0 / 0.
        labels = torch.full((), step.labels or 1, device=self.device)
        if (own_data := self.job.degrees.own_data) > 1:  # the mean of their gradients is the whole job's
            labels = labels / own_data
        losses = []
        if step.flow is None:
            run = self.config.training.local_batch_size if self.parallel_dims.pp_enabled else 1
            groups = list(grouped(step.items, run))
            for number, group in enumerate(groups):
                self._reduce_gradients(group is groups[-1])
                self.timer.first = number * run
                losses.append(self.forward_backward(group, labels))
        else:
            cache = KeyValueCache()
            losses.append(self.forward_backward(step.items, labels, cache, step.flow[0], step.lowered))
            cache.check_empty()
        for axis in self.axes:
            axis.before_optimizer(self)
        return torch.stack(losses).sum() / own_data

    def update(self) -> torch.Tensor:
        """Clips the gradients, and steps optimizers and schedules; returns the gradients' norm."""
        grad_norm = dist_utils.clip_grad_norm_(
            [parameter for part in self.model_parts for parameter in part.parameters()],
            self.config.training.max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        for axis in self.axes:
            axis.after_optimizer(self, meets=meets(self, axis.every))
        self.lr_schedulers.step()
        return grad_norm

    def _reduce_gradients(self, now: bool) -> None:
        """Sets whether the next backward pass reduces gradients or leaves that to a later one.

        If FSDP shards nothing, unreduced gradients are no larger, so a step reduces once, and weights stay
        gathered between passes. A pipeline's stages do so by themselves. A compiled model reduces every time:
        Dynamo does not compile for a second length while bfloat16 weights have float32 gradients.
        """
        dims, compiled = self.parallel_dims, self.job.memory.compiled
        whole = dims.dp_shard * dims.cp == 1 and not (dims.ep_enabled or dims.pp_enabled or compiled)
        if not whole or now is self._reduces:
            return
        self._reduces = now
        for part in self.model_parts:
            part.set_requires_gradient_sync(now)
            part.set_reshard_after_backward(now)

    @property
    def lower(self) -> Callable[[Flow], PackFlowSchedule] | None:
        """Makes the schedule of an order of passes; None without a pipeline."""
        return self.pp_schedule.lower if self.parallel_dims.pp_enabled else None

    def forward_backward(
        self,
        group: Sequence[Item],
        labels: torch.Tensor,
        cache: KeyValueCache | None = None,
        actions: Sequence[Action] = (),
        lowered: PackFlowSchedule | None = None,
    ) -> torch.Tensor:
        """The group's part of the loss: its sum on this rank, divided by the labels of the whole job.

        A step in slices has keys in `cache` and an order of its passes: `lowered` in a pipeline, else the
        `actions` of this rank.
        """
        if self.parallel_dims.pp_enabled:
            moved = [self.to_device(item, cache) for item in group]
            with self.train_context():
                return self.pp_schedule.step(moved, labels, lowered).detach()
        if cache is not None:
            return self._run_alone(group, actions, labels, cache)
        (item,) = group
        with self.timer.time("FB", 0, 0):
            inputs, targets, extra = self.to_device(item)
            return self.fwd_bwd_fn(inputs, targets, labels, extra).detach()

    def _run_alone(
        self, items: Sequence[Item], actions: Sequence[Action], labels: torch.Tensor, cache: KeyValueCache
    ) -> torch.Tensor:
        """A step of MicroPacks without a pipeline: forward and backward passes one by one."""
        losses: dict[int, torch.Tensor] = {}
        total = torch.zeros((), device=self.device)
        for number, (kind, _, place) in enumerate(actions, start=1):
            self._reduce_gradients(number == len(actions))
            with self.timer.time(kind, 0, place), self.train_context():
                if kind == "F":
                    inputs, targets, extra = self.to_device(items[place], cache)
                    hidden = self.model_parts[0](inputs, **extra)
                    losses[place], _ = self.loss_fn(hidden, targets, labels, positions=extra["positions"])
                    del hidden
                else:
                    loss = losses.pop(place)
                    loss.backward()
                    total += loss.detach()
        return total

    def report(
        self, step: Step, loss: torch.Tensor, grad_norm: torch.Tensor, learning_rates: dict[str, float]
    ) -> None:
        """Reports a step; every rank takes part."""
        mesh = self.parallel_dims.get_optional_mesh("loss")
        own_mean = loss * (step.labels / step.own_labels if step.own_labels else 0.0)
        mean, largest = dist_utils.dist_sum(loss, mesh), dist_utils.dist_max(own_mean, mesh)
        seen = torch.tensor(self.ntokens_seen, dtype=torch.int64, device=self.device)
        figures = {
            "n_tokens_seen": dist_utils.dist_sum(seen, mesh),
            **learning_rates,
            **step.figures(self.job),
            **self.step_trace.end(self.step, step.plan, self.job),
            **measured_memory(self.parallel_dims, self.device, step, step.repeated),
            **self.expert_load.figures(),
        }
        self.metrics_processor.log(self.step, mean, largest, float(grad_norm), figures)

    def close(self) -> None:
        self.dataloader.close()
        if self.config.validator.enable:
            self.validator.close()
        super().close()


def with_our_parts(config: TrainerConfig, job: Job, axes: Sequence[Axis], tokenizer: str) -> TrainerConfig:
    """A copy that a trainer may change, with our attention, validator, loss, stages and axes."""
    wlb, spec = config.wlb, config.model_spec
    for _, attention, _, _ in spec.traverse(DocumentAttention.Config):
        attention.implementation = wlb.attention.implementation
        attention.sm_margin = wlb.attention.sm_margin
    hugging_face = config.checkpoint.initial_load_in_hf or config.checkpoint.last_save_in_hf
    if hugging_face and drop_router_bias(spec):
        logger.info(
            f"The routers train without a bias, which {spec.name} does not have in Hugging Face's format"
        )
    build = partial(build_optimizers, config.optimizer)
    divide = partial(parallelized, spec.parallelize_fn, axes)
    stages = partial(regrouped_pipeline, spec.pipelining_fn) if job.packing.regroups else spec.pipelining_fn
    return dataclasses.replace(
        config,
        comm=dataclasses.replace(config.comm),
        training=dataclasses.replace(config.training),
        hf_assets_path=tokenizer,
        tokenizer=SimpleNamespace(build=lambda tokenizer_path: None, to_dict=dict),  # a corpus has token ids
        validator=Validator.Config(enable=wlb.validation.enabled, freq=max(wlb.validation.every, 1)),
        optimizer=SimpleNamespace(build=build, to_dict=config.optimizer.to_dict),
        loss=weighted(config.loss) if wlb.loss_weight == "conversation" else config.loss,
        model_spec=dataclasses.replace(counted_once(spec), pipelining_fn=stages, parallelize_fn=divide),
    )
