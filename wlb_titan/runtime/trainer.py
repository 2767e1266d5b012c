"""torchtitan's trainer on planned micro-batches.

A micro-batch is one packed sequence, so the batch dimension is always 1. The step of the whole job is
`global_batch_size` micro-batches (or local_batch_size x data-parallel degree), whatever the parallelism:
with pipeline parallelism a rank's `local_batch_size` micro-batches go through the pipeline together, without
it they are accumulated one by one.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.metrics import MetricsProcessor as TitanMetricsProcessor
from torchtitan.components.validate import Validator as TitanValidator
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer as TorchtitanTrainer

from wlb_titan.config.settings import WlbSettings
from wlb_titan.packing.policy import here
from wlb_titan.plan import Action, Flow
from wlb_titan.runtime.advice import advice
from wlb_titan.runtime.attention.implementation import compile_attention
from wlb_titan.runtime.attention.kv_cache import KeyValueCache
from wlb_titan.runtime.attention.merged import prepare_merging
from wlb_titan.runtime.attention.module import DocumentAttention
from wlb_titan.runtime.compat import Dims, batch_of
from wlb_titan.runtime.data.corpus import open_corpus, training_documents
from wlb_titan.runtime.data.dataloader import PlannedDataLoader, Step
from wlb_titan.runtime.data.epochs import steps_of_epochs
from wlb_titan.runtime.data.inputs import Item, grouped, to_device
from wlb_titan.runtime.data.shared_answer import SharedAnswer
from wlb_titan.runtime.data.tokenizer import Tokenizer
from wlb_titan.runtime.dimension import Axis, axes_of, prepared
from wlb_titan.runtime.export import complete_export
from wlb_titan.runtime.imbalance import plan_figures
from wlb_titan.runtime.job import configured_job, parallel_dims
from wlb_titan.runtime.life.checkpoints import save_stopped
from wlb_titan.runtime.life.timeouts import train_timeout
from wlb_titan.runtime.loss import weighted
from wlb_titan.runtime.memory import describe_memory, measured_memory
from wlb_titan.runtime.metrics import MetricsProcessor, metrics_rank, spoken
from wlb_titan.runtime.models.compile import allow_graphs, keep_inputs
from wlb_titan.runtime.pipeline.pass_timer import PassTimer
from wlb_titan.runtime.pipeline.regroup import regrouped_pipeline
from wlb_titan.runtime.step_trace import StepTrace
from wlb_titan.runtime.validator import Validator
from wlb_titan.simulator.choice import Choice, choose


class Trainer(TorchtitanTrainer):
    """Trains on a prepared corpus under the packing and sharding policies of `config.wlb`."""

    @dataclass(kw_only=True, slots=True)
    class Config(TorchtitanTrainer.Config):
        wlb: WlbSettings = field(default_factory=WlbSettings)
        """What wlb_titan adds: corpus, packing, sharding."""

        metrics: TitanMetricsProcessor.Config = field(default_factory=MetricsProcessor.Config)
        validator: TitanValidator.Config = field(default_factory=Validator.Config)

    def __init__(self, config: Config) -> None:
        corpus = open_corpus(config.wlb.corpus)
        configured = configured_job(config, parallel_dims(config, int(os.environ["WORLD_SIZE"])))
        self.job = configured.trained
        self._shadow = configured if configured.packing.shadow else None
        self._choice: Choice | None = None
        config = dataclasses.replace(
            config,
            comm=dataclasses.replace(config.comm),
            training=dataclasses.replace(config.training),
            hf_assets_path=str(corpus.tokenizer_path),
            tokenizer=Tokenizer.Config(),
            dataloader=PlannedDataLoader.Config(
                corpus=config.wlb.corpus,
                job=self.job,
                loss_weight=config.wlb.loss_weight,
                hold_out=config.wlb.validation.hold_out,
            ),
            validator=Validator.Config(
                enable=config.wlb.validation.enabled, freq=max(config.wlb.validation.every, 1)
            ),
            loss=weighted(config.loss) if config.wlb.loss_weight == "conversation" else config.loss,
        )
        assert config.model_spec is not None
        stages: Any = config.model_spec.pipelining_fn
        if self.job.packing.regroups:
            stages = partial(regrouped_pipeline, stages)
        if config.wlb.pipeline.check_lengths and stages is not None:
            stages = partial(stages, check_lengths=True)
        config.model_spec = dataclasses.replace(config.model_spec, pipelining_fn=stages)
        self.axes: list[tuple[int, Axis]] = []  # of [[wlb.dimensions]], which `init_distributed` makes
        if config.wlb.dimensions:
            config.model_spec = prepared(config.model_spec, self.axes)
        super().__init__(config)
        self._cache: KeyValueCache | None = None  # of the step under way
        self._reduces = True
        self.timer = self.pp_schedule.timer if self.parallel_dims.pp_enabled else PassTimer(self.device)
        self.step_trace = StepTrace(
            self.timer,
            every=config.wlb.trace_every,
            parallel_dims=self.parallel_dims,
            writer=metrics_rank(self.parallel_dims, config.parallelism.pipeline_parallel_schedule),
            folder=config.dump_folder,
        )
        if config.compile.enable:
            allow_graphs(self.job)
            keep_inputs()
        self._prepare_merging()
        if self.parallel_dims.pp_enabled:
            self.planned.lower = self.pp_schedule.lower
        if self.device.type == "cpu":
            # gloo has no premultiplied sum, which FSDP would use for its gradient scaling.
            for part in self.model_parts:
                for module in part.modules():
                    if isinstance(module, FSDPModule):
                        module.set_force_sum_reduction_for_comms(True)

        if config.validator.enable:
            self.validator.prepare(self)

    def _prepare_merging(self) -> None:
        """Groups of data-parallel ranks that may share micro-batches."""
        comm = self.config.comm
        timeout = timedelta(seconds=max(comm.init_timeout_seconds, comm.train_timeout_seconds))
        prepare_merging(self.model_parts, self.job, self.parallel_dims, timeout)

    def init_distributed(self) -> ParallelDims:
        """Starts the process groups, and then chooses the policies, before anything is built from them."""
        world_size = dist_utils.init_distributed(
            self.config.comm,
            enable_cpu_backend=self.config.training.enable_cpu_offload,
            base_folder=self.config.dump_folder,
        )
        dims = parallel_dims(self.config, world_size)
        epochs = self.config.wlb.epochs
        configured = self._shadow or self.job
        if configured.undecided or epochs:
            documents = training_documents(self.config.wlb)
        if configured.undecided:
            self._choice = choose(configured, documents, on_one_rank=SharedAnswer())
            self.job = self._choice.job.trained
            self._shadow = self._shadow and self._choice.job
        if epochs:
            # A solver that is stopped by its time limit finds other packings on other ranks.
            shared = SharedAnswer() if self.job.packing.planning_seconds else here
            self.config.training.steps = steps_of_epochs(self.job, documents, epochs, shared)
            logger.info(f"wlb.epochs = {epochs} takes {self.config.training.steps:,} steps")
        self._set_up_job(self.config, dims)
        return dims

    def _set_up_job(self, config: Config, dims: Dims) -> None:
        """Tells the parts of the trainer's own configuration what the job is."""
        self.axes += axes_of(dims)
        assert config.model_spec is not None
        for _, attention, _, _ in config.model_spec.traverse(DocumentAttention.Config):
            attention.context = self.job.sharding
            attention.implementation = config.wlb.attention.implementation
        config.comm.train_timeout_seconds, self._timeout_reason = train_timeout(config, self.job)
        loader = config.dataloader
        loader.job, loader.shadow = self.job, self._shadow
        if dims.cp_enabled:
            loader.context_rank = dims.get_mesh("cp").get_local_rank()
        if dims.tp_enabled and config.parallelism.enable_sequence_parallel:
            mesh = dims.get_mesh("tp")
            loader.tensor_rank = mesh.get_local_rank(), mesh.size()

    @property
    def planned(self) -> PlannedDataLoader:
        return cast(PlannedDataLoader, self.dataloader)

    begin: Callable[[int], None] = staticmethod(lambda step: None)
    """Called on every rank when the run begins: after a checkpoint was loaded, with its step, or with 0."""

    goes_on: Callable[[int], bool] = staticmethod(lambda step: True)
    """Asked on every rank between two steps: whether a step follows on the one of this number."""

    def should_continue_training(self) -> bool:
        if not super().should_continue_training():
            return False
        if self.goes_on(self.step):
            return True
        for every, axis in self.axes:
            axis.after_optimizer(self, meets=not self._meets(every))
        saved = save_stopped(self.checkpointer, self.step, self._first_step)
        logger.info(f"Stopped after step {self.step} of {self.config.training.steps}: {saved}.")
        return False

    def batch_generator(self, data_iterable: PlannedDataLoader) -> Iterator[Step]:
        """The loader's steps; the metrics get the seconds that each was waited for."""
        self._first_step, self._began = self.step + 1, time.monotonic()
        self.metrics_processor.last_step = self.config.training.steps
        self.begin(self.step)
        return self._timed_steps(data_iterable)

    def _timed_steps(self, data_iterable: PlannedDataLoader) -> Iterator[Step]:
        steps = iter(data_iterable)
        while True:
            begin = time.perf_counter()
            step = next(steps)
            self.metrics_processor.data_loading_times.append(time.perf_counter() - begin)
            yield step

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Starts the copies of a micro-batch to the device; see `to_device`."""
        self.ntokens_seen += labels.shape[1]  # 0 where only the backward pass has labels
        cache = self._cache.number if self._cache is not None else None
        return to_device(input_dict, labels, self.device, cache)

    def forward_backward_step(self, **arguments: Any) -> torch.Tensor:
        if self.parallel_dims.pp_enabled:
            return super().forward_backward_step(**arguments)
        with self.timer.time("FB", 0, 0):
            loss = super().forward_backward_step(**arguments)
        self.timer.first += 1
        return loss

    def train_step(self, data_iterator: Iterator[Step]) -> None:
        """One optimizer step; only a step that is logged or traced waits for the device.

        It takes the place of torchtitan's, which waits for the device at every copy, and which asks all ranks
        for a number that the plan knows: how many tokens of the step have a label.
        """
        step = next(data_iterator)
        self.step_trace.begin(self.step)
        self.optimizers.zero_grad()
        learning_rates = self.lr_schedulers.get_metrics()
        # A step without a learned token has a loss and gradients of 0, not 0 / 0.
        kind = torch.int64 if isinstance(step.labels, int) else torch.float32
        labels = torch.full((), step.labels or 1, dtype=kind, device=self.device)
        if (apart := self.job.degrees.apart) > 1:  # the mean of their gradients is that of the whole job
            labels = labels / apart
        if step.flow is None:
            run = batch_of(self.config).run if self.parallel_dims.pp_enabled else 1
            groups = list(grouped(step.items, run))
            losses = []
            for group in groups:
                self._reduce_gradients(group is groups[-1])
                losses.append(self._forward_backward(group, labels))
        else:
            losses = [self._run_flow(step, step.flow, labels)]
        for _, axis in self.axes:
            axis.before_optimizer(self)
        grad_norm = dist_utils.clip_grad_norm_(
            [parameter for part in self.model_parts for parameter in part.parameters()],
            self.config.training.max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        for every, axis in self.axes:
            axis.after_optimizer(self, meets=self._meets(every))
        self.lr_schedulers.step()
        self.metrics_processor.count(step.plan.tokens, step.flops)
        if self.metrics_processor.should_log(self.step):
            self._log(step, torch.stack(losses).sum() / apart, grad_norm, learning_rates)
        self.step_trace.end(self.step, step.plan)  # where the step was not logged

    def _meets(self, every: int) -> bool:
        """Whether ranks that meet every so many steps do so in this one: also in the last, which is saved."""
        return self.step % every == 0 or self.step == self.config.training.steps

    @property
    def _compiled(self) -> bool:
        return self.config.compile.enable and "model" in self.config.compile.components

    def _reduce_gradients(self, now: bool) -> None:
        """Whether the next backward pass reduces gradients, or leaves them as they are for a later one.

        Where FSDP shards nothing they are as large before as after it, so that a step reduces once. Weights
        then stay gathered from one backward pass to the next forward pass. A pipeline's stages do the like
        by themselves. A compiled model reduces every time: Dynamo refuses to compile for a second length
        while weights in bfloat16 have gradients in float32.
        """
        dims = self.parallel_dims
        whole = dims.dp_shard * dims.cp == 1 and not (dims.ep_enabled or dims.pp_enabled or self._compiled)
        if not whole or now is self._reduces:
            return
        self._reduces = now
        for part in self.model_parts:
            part.set_requires_gradient_sync(now)
            part.set_reshard_after_backward(now)

    def _forward_backward(self, group: Sequence[Item], labels: torch.Tensor) -> torch.Tensor:
        """The group's part of the loss: its sum on this rank over the labels of the whole job."""
        inputs, targets = [item for item, _ in group], [own for _, own in group]
        if not self.parallel_dims.pp_enabled:
            (inputs,), (targets,) = inputs, targets
        return self.forward_backward_step(
            input_dict=inputs, labels=targets, global_valid_tokens=labels
        ).detach()

    def _run_flow(self, step: Step, flow: Flow, labels: torch.Tensor) -> torch.Tensor:
        """A step of MicroPacks, whose passes run in the plan's order; as `_forward_backward`."""
        self._cache = KeyValueCache()
        try:
            if self.parallel_dims.pp_enabled:
                self.pp_schedule.flow = flow
                loss = self._forward_backward(step.items, labels)
            else:
                loss = self._run_alone(step.items, flow[0], labels)
            self._cache.check_empty()
        finally:
            self._cache = None
        return loss

    def _run_alone(self, items: list[Item], actions: Sequence[Action], labels: torch.Tensor) -> torch.Tensor:
        """A step without a pipeline: forward and backward passes one by one."""
        losses: dict[int, torch.Tensor] = {}
        total = torch.zeros((), device=self.device)
        for number, (kind, _, place) in enumerate(actions, start=1):
            self._reduce_gradients(number == len(actions))
            with self.timer.time(kind, 0, place), self.train_context():
                if kind == "F":
                    inputs, targets, extra = self.post_dataloading_process(*items[place])
                    hidden = self.model_parts[0](inputs, **extra)
                    losses[place], _ = self.loss_fn(hidden, targets, labels, positions=extra["positions"])
                    del hidden
                else:
                    loss = losses.pop(place)
                    loss.backward()
                    total += loss.detach()
        return total

    def _log(
        self, step: Step, loss: torch.Tensor, grad_norm: torch.Tensor, learning_rates: dict[str, float]
    ) -> None:
        """Reports a step; every rank takes part."""
        mesh = self.parallel_dims.get_optional_mesh("loss")
        own_mean = loss * (step.labels / step.own_labels if step.own_labels else 0.0)
        mean, largest = dist_utils.dist_sum(loss, mesh), dist_utils.dist_max(own_mean, mesh)
        if not math.isfinite(mean):
            raise RuntimeError(f"The loss of step {self.step} is {mean}; training stops.")
        seen = torch.tensor(self.ntokens_seen, dtype=torch.int64, device=self.device)
        extra = {"n_tokens_seen": dist_utils.dist_sum(seen, mesh), **learning_rates}
        self.metrics_processor.log(
            self.step, mean, largest, float(grad_norm), extra | self._step_figures(step)
        )

    def _step_figures(self, step: Step) -> dict[str, Any]:
        """What the plan of the current step says, for metrics.jsonl."""
        plan = step.plan
        return {
            "tokens": plan.tokens,
            "labels": step.labels,
            "padding": plan.padding,
            **plan_figures(plan, self.job),
            **self._shadow_figures(step),
            **step.source_figures,
            **self.step_trace.end(self.step, plan),
            **measured_memory(self.parallel_dims, self.device),
        }

    def _shadow_figures(self, step: Step) -> dict[str, Any]:
        """What the configured policies would have made of it, where they only plan."""
        if step.shadow is None:
            return {}
        return {f"shadow/{key}": value for key, value in plan_figures(step.shadow, self._shadow).items()}

    def close(self) -> None:
        self.planned.close()
        if self.config.validator.enable:
            self.validator.close()
        super().close()

    def train(self) -> None:
        logger.info(
            f"Corpus {self.planned.corpus}: {len(self.planned.corpus):,} documents, "
            f"{self.planned.corpus.lengths.sum():,} tokens"
        )
        if self._choice is not None:
            for row in self._choice.rows():
                logger.info(", ".join(f"{heading} {cell}" for heading, cell in row.items()))
            for line in self._choice.remarks():
                logger.info(line)
        for line in describe_memory(self.job, training_documents(self.config.wlb, self.planned.corpus)):
            logger.info(line)
        for line in advice(self.job, compiled=self._compiled, on_gpu=self.device.type == "cuda"):
            logger.info(line)
        compile_attention(self.config, self.job, self.device, self.config.dataloader.context_rank)
        comm = self.config.comm
        logger.info(
            f"A rank that does not answer is given up after {comm.init_timeout_seconds} s in the first step, "
            f"{comm.train_timeout_seconds} s from then on ({self._timeout_reason})"
        )
        super().train()
        checkpoint, done = self.config.checkpoint, self.step >= self.config.training.steps
        if done and checkpoint.last_save_in_hf and dist.get_rank() == 0:
            folder = Path(self.config.dump_folder) / checkpoint.folder / f"step-{self.step}"
            if checkpoint.enable and not checkpoint.load_only and folder.is_dir():
                complete_export(folder, self.config, self.planned.corpus)
        if done and self.planned.plan is not None:
            took = spoken(time.monotonic() - self._began)
            logger.info(
                f"Done: step {self.step} was the last, after {took}. All is in {self.config.dump_folder}"
            )
        elif done:
            logger.warning(
                f"Nothing was left to do: the checkpoint in {self.config.dump_folder} is of step "
                f"{self.step}, and training.steps is {self.config.training.steps}. Raise it to go on, or "
                "name another dump_folder to start anew."
            )
