"""Every private name of torch and torchtitan that the runtime uses, with what it is for.

The versions are pinned to torch 2.15 and torchtitan 0.3.0; a new version may rename or change any of these.
`tests/unit/test_compat.py` compares each with what the code was written against and says what changed. What
to do then stands beside the name.

Overridden or set on torch's own classes, without an import, and covered by the same test:

- `PipelineStage.args_recv_info`, `grad_recv_info`, `act_send_info`, `chunks`, `_stage_meta`,
  `_runtime_validate`: how a stage knows what it receives and sends (torch.distributed.pipelining.stage).
  If they go, `PlannedStage.set_micro_batch_lengths` has to tell the lengths to their successor.
- `PipelineStage._retrieve_recv_activations`, `_forward_chunk_states` and
  `_PipelineSchedule._maybe_compute_loss`, `_maybe_get_loss`, `_compute_loss`, `_internal_losses`: where a
  stage takes its inputs from, and when the loss is computed, so that backward passes can have micro-batches
  of their own (`runtime/pipeline/regroup.py`). Without them: no asymmetric partition.
- `Decoder._skip_lm_head` (torchtitan): whether the last stage makes logits. Without it: forward passes under
  the asymmetric partition make logits that nobody needs.
- `PipelineStage._user_meta`: what a stage's maker says of shapes; complete, so that nothing is inferred.
  Without it: pass `input_args` and `output_args` to torch's constructor.
- `PipelineScheduleMulti._initialize_stages`, `PipelineStage._inference_mode`: how a new schedule connects the
  ranks of its stages, and what it leaves with them. Without them: each step in slices waits for that.
- `CheckpointWrapper.checkpoint_fn` (torch.distributed.algorithms): how a block is checkpointed, where
  torchtitan sets no early stop. Without it: no early stop, at the price of one matrix product a layer.
- `AllToAllTokenDispatcher._sync_token_count_exchange`: how many tokens go to which expert-parallel rank,
  which a dry run cannot know. Without it: such models are refused there.
- `ParallelDims.build_mesh` and what it fills (`_world_mesh`, `_global_meshes`, `_single_axis_meshes`,
  `_spmd_meshes`), `_validate`, `_mesh_exist`, `dp_enabled`, and `DeviceMesh._unflatten`, `_flatten`: the
  meshes of a job with dimensions of its own (`Dims`). Without them: no [[wlb.dimensions]].
- `PipelineStage._prepare_forward_infra`, `_prepare_backward_infra`, `_pre_metadata_inference_backup`,
  `_post_metadata_inference_cleanup`: torch's inference of shapes, which `PlannedStage` leaves out.
- `LocalElasticAgent._stop_workers`, `_monitor_workers`, `_shutdown`, `_exit_barrier`, `_worker_group`,
  `_pcontext`, `_remaining_restarts`, `_exit_barrier_timeout`: how a host's ranks are stopped, started again
  and waited for (`launch/elastic.py`). Without them: torchrun, which passes no signal on politely.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

# Has torch.compile take a dimension as a symbol from the start, whatever its size. Without it,
# `maybe_mark_dynamic`: one more graph for each length with a single document.
from torch._dynamo.decorators import mark_unbacked

# Passes of one's own over the graph of a block's forward and backward, before torch parts it. Not needed any
# more when Inductor's `remove_no_ops` leaves the tags of a graph's inputs alone; see `KeepInputs`.
from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes

# Tensors with shapes and without memory, the mode that makes them, what is raised where values are asked
# for, and what leaves the mode for a while: what a dry run runs on. Without them: no dry run; torch.compile
# stands on them, so that they will have a successor.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

# What a functional collective returns until it is waited for; the tensor inside is the one that is allocated.
# Without it: the trace of a dry run counts such results when they are waited for.
# And the all-to-all of Ulysses, with its gradient. Without it: an autograd function of two of dist's own.
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_to_all_single_autograd

# Calls a function of ours in place of a layer, without changing the names of its weights. Without it: a
# module of our own, and its prefix in the names of checkpoints.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

# The process group of a name that a functional collective has. Without it: a dry run names groups that are
# none of the mesh's axes by a number. And all groups of this rank. Without it: those of its meshes, of which
# FSDP makes one.
from torch.distributed.distributed_c10d import _resolve_process_group, _world

# Raises where a step was interrupted with receives under way. Without it: drop the check.
from torch.distributed.pipelining._recv_buffers import _ensure_recv_infos_drained as ensure_receives_drained

# What a stage receives from which stage. PlannedStage makes one for each micro-batch, as torch's stage does
# once for all; if it changes, look at PipelineStage._prepare_forward_infra.
from torch.distributed.pipelining._recv_buffers import _RecvInfo as RecvInfo

# Shapes of a stage's inputs and outputs, with which torch compares what it sends and gets.
from torch.distributed.pipelining._utils import _StageMeta as StageMeta
from torch.distributed.pipelining._utils import _TensorMeta as TensorMeta

# A schedule that is given as actions, and these: what PackFlow's orders run on. Without them: torch's
# schedules from a CSV file run such orders too.
from torch.distributed.pipelining.schedules import _Action as ScheduleAction
from torch.distributed.pipelining.schedules import _ComputationType as ComputationType

# The base class of torch's schedules; for annotations only.
from torch.distributed.pipelining.schedules import _PipelineSchedule as PipelineSchedule
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as PipelineScheduleRuntime

# Which rank reports the loss. Without it: the first rank of the last stage, as its docstring says.
from torchtitan.components.metrics import _get_metrics_rank as metrics_rank_of
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Configurable

# The pieces of torchtitan's `pipeline_llm`, which `runtime.pipeline.pipeline` puts together differently:
# build a schedule, divide layers into stages, read the numbers that this needs, cut a model into stages.
# If one goes, take the new `pipeline_llm` apart again.
from torchtitan.distributed.pipeline_parallel import _build_pipeline_schedule as build_pipeline_schedule
from torchtitan.distributed.pipeline_parallel import (
    _generate_llm_fqn_per_model_part as modules_of_stages,
)
from torchtitan.distributed.pipeline_parallel import _get_pipeline_metadata as pipeline_metadata
from torchtitan.distributed.pipeline_parallel import _pipeline_module_split as split_into_stages


def in_backward_pass() -> bool:
    """Whether this thread runs a backward pass. Without the name: torch.utils.module_tracker has it."""
    return torch._C._current_graph_task_id() != -1


def fake_group(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """A process group without other processes, which repeats this rank's own data: what a rehearsal runs on.

    Without it: a `dist.ProcessGroup` of ours with a method for each collective.
    """
    fake = torch._C._distributed_c10d.FakeProcessGroup
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group = dist.ProcessGroup(store, rank, size)
    backend = fake._create_internal(rank, size, fake.Options())
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)
    return group


def owner_of(config: Configurable.Config) -> type:
    """The class that a configuration builds; its own class if it belongs to none.

    torchtitan sets `_owner` where a class defines its Config. Without it: look the class up by the
    configuration's qualified name, which is nested in it.
    """
    return config._owner or type(config)


def ranks_of_group(name: str) -> list[int]:
    """Global ranks of a process group."""
    return dist.get_process_group_ranks(_resolve_process_group(name))


def process_groups() -> list[dist.ProcessGroup]:
    """Those of this rank that wait for others; torch's fake ones wait for nobody."""
    return [group for group, (backend, _) in _world.pg_map.items() if backend != "fake"]


def groups_made() -> tuple[int, dict[str, list[int]]]:
    """How many process groups this rank took part in making, as a member or not; and by name, in the order of
    making, the global ranks of those that it is in.

    Without `_world`: a dry run does not compare in which order ranks make groups.
    """
    groups = {name: list(_world.pg_group_ranks[group]) for group, name in _world.pg_names.items()}
    return _world.group_count, groups


def place_in_batch() -> int | None:
    """Which operation of the `batch_isend_irecv` under way this is, from 0; None outside of one.

    Reads two of its local variables. Without them: sends and receives count as issued one by one.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not dist.batch_isend_irecv.__code__:
        frame = frame.f_back
    if frame is None:
        return None
    here = frame.f_locals
    return next(i for i, one in enumerate(here["p2p_op_list"]) if one is here["p2p_op"])


def optimizer_factory(
    container: type[OptimizersContainer], name: str
) -> Callable[..., torch.optim.Optimizer]:
    """What a name of `optimizer_name` makes; NotImplementedError where torchtitan has none of this name.

    Without it: `getattr(torch.optim, name)`.
    """
    return container._resolve_optimizer_factory(name)
