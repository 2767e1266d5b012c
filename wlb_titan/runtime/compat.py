"""Every private name of torch and torchtitan that the runtime uses, with what it is for.

torch is pinned to 2.15 and torchtitan to 0.3.0; another version may rename or change any of these names, and
`tests/unit/test_compat.py` then says which. What to do stands beside each name.

Overridden or set on classes of torch and torchtitan, without an import, and covered by the same test:

- `PipelineStage.args_recv_info`, `grad_recv_info`, `act_send_info`, `chunks`, `_stage_meta`,
  `_runtime_validate`: what a stage receives and sends. Without them:
  `PlannedStage.set_micro_batch_lengths` has to tell the lengths to their successor.
- `PipelineStage._retrieve_recv_activations`, `_forward_chunk_states` and
  `_PipelineSchedule._maybe_compute_loss`, `_maybe_get_loss`, `_compute_loss`, `_internal_losses`: a stage's
  inputs and the moment of the loss, which let backward passes have micro-batches of their own
  (`runtime/pipeline/regroup.py`). Without them: no asymmetric partition.
- `Decoder._skip_lm_head`: whether the last stage makes logits. Without it: forward passes under the
  asymmetric partition make logits that nobody needs.
- `PipelineStage._user_meta`: all shapes, so that torch infers none.
  Without it: pass `input_args` and `output_args` to torch's constructor.
- `PipelineScheduleMulti._initialize_stages`, `_stages`, `_n_microbatches`, `PipelineStage._inference_mode`,
  `_PipelineScheduleRuntime._prepare_schedule_with_comms`: how a new schedule connects the ranks of its stages
  and what they run. Without them: each step in slices waits for that.
- `CheckpointWrapper.checkpoint_fn`: sets the early stop that torchtitan leaves out. Without it: one more
  matrix product a layer.
- `AllToAllTokenDispatcher._sync_token_count_exchange`: how many tokens go to which expert-parallel rank,
  which a dry run cannot know. Without it: dry runs refuse models with experts.
- `ParallelDims.build_mesh` and what it fills (`_world_mesh`, `_global_meshes`, `_single_axis_meshes`,
  `_spmd_meshes`), `_validate`, `_mesh_exist`, `dp_enabled`, and `DeviceMesh._unflatten`, `_flatten`: the
  meshes of a job with the user's dimensions (`Dims`). Without them: no [[wlb.dimensions]].
- `PipelineStage._prepare_forward_infra`, `_prepare_backward_infra`, `_pre_metadata_inference_backup`,
  `_post_metadata_inference_cleanup`: torch's inference of shapes, which `PlannedStage` leaves out.
- `LocalElasticAgent._start_workers`, `_stop_workers`, `_monitor_workers`, `_shutdown`, `_exit_barrier`,
  `_worker_group`, `_pcontext`, `_remaining_restarts`, `_exit_barrier_timeout`: how a host's ranks start, stop
  and are restarted (`launch/elastic.py`). Without them: torchrun, which passes no signal on politely.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

# Makes a dimension a symbol for torch.compile, whatever its size. Without it, `maybe_mark_dynamic`: one more
# graph for each length with a single document.
from torch._dynamo.decorators import mark_unbacked

# For `KeepInputs`. Not needed once Inductor's `remove_no_ops` leaves the tags of a graph's inputs alone.
from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes

# For `late_waits`. Without it: groups of heads are exchanged one after the other where blocks are compiled.
from torch._inductor.utils import contains_wait

# Tensors with shapes and without memory, on which a dry run runs. Without them: no dry run; torch.compile
# needs them too, so they will have a successor.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

# A collective's result before anything waits for it. Without it: a dry run's trace counts it later.
# And the all-to-all of Ulysses, with its gradient. Without it: an autograd function of two of dist's own.
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_to_all_single_autograd

# Wrap a layer without renaming its weights. Without them: a module of ours, with a prefix in checkpoints.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, checkpoint_wrapper

# The process group of a name. Without it: a dry run numbers groups that are no axis of the mesh. And all
# groups of this rank. Without it: those of its meshes, of which FSDP makes one.
from torch.distributed.distributed_c10d import _resolve_process_group, _world

# Raises where a step was interrupted with receives under way. Without it: drop the check.
from torch.distributed.pipelining._recv_buffers import _ensure_recv_infos_drained as ensure_receives_drained

# What a stage receives from which stage. If it changes, look at PipelineStage._prepare_forward_infra.
from torch.distributed.pipelining._recv_buffers import _RecvInfo as RecvInfo

# Shapes of a stage's inputs and outputs.
from torch.distributed.pipelining._utils import _StageMeta as StageMeta
from torch.distributed.pipelining._utils import _TensorMeta as TensorMeta

# A schedule given as actions, for PackFlow's orders. Without them: torch's schedules from a CSV file.
from torch.distributed.pipelining.schedules import _Action as ScheduleAction
from torch.distributed.pipelining.schedules import _ComputationType as ComputationType

# For annotations only.
from torch.distributed.pipelining.schedules import _PipelineSchedule as PipelineSchedule
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as PipelineScheduleRuntime

# Which rank reports the loss. Without it: the first rank of the last stage, as its docstring says.
from torchtitan.components.metrics import _get_metrics_rank as metrics_rank_of
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Configurable

# The pieces of torchtitan's `pipeline_llm`, which `runtime.pipeline.pipeline` puts together differently.
# If one goes, take the new `pipeline_llm` apart again.
from torchtitan.distributed.pipeline_parallel import _build_pipeline_schedule as build_pipeline_schedule
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part as modules_of_stages
from torchtitan.distributed.pipeline_parallel import _get_pipeline_metadata as pipeline_metadata
from torchtitan.distributed.pipeline_parallel import _pipeline_module_split as split_into_stages


def in_backward_pass() -> bool:
    """Whether this thread runs a backward pass. Without the name: torch.utils.module_tracker has it."""
    return torch._C._current_graph_task_id() != -1


def fake_group(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """A group without other processes, which repeats this rank's data, for rehearsals. Without it: a
    `dist.ProcessGroup` of ours with a method for each collective."""
    fake = torch._C._distributed_c10d.FakeProcessGroup
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group = dist.ProcessGroup(store, rank, size)
    backend = fake._create_internal(rank, size, fake.Options())
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)
    return group


def owner_of(config: Configurable.Config) -> type:
    """The class that a configuration builds; the configuration's own if it belongs to none. Without `_owner`:
    look the class up by the configuration's qualified name."""
    return config._owner or type(config)


def recipe_of(linear: Configurable.Config) -> object:
    """torchao's configuration of a linear layer that multiplies in float8, or None. Without
    `_torchao_config`: that of the layer once it is built."""
    return getattr(linear, "_torchao_config", None)


def ranks_of_group(name: str) -> list[int]:
    return dist.get_process_group_ranks(_resolve_process_group(name))


def process_groups() -> list[dist.ProcessGroup]:
    """This rank's process groups, except torch's fake ones, which wait for nobody."""
    return [group for group, (backend, _) in _world.pg_map.items() if backend != "fake"]


def groups_made() -> tuple[int, dict[str, list[int]]]:
    """How many process groups this rank helped to make, and the global ranks of its own by name, in the order
    of making. Without `_world`: a dry run does not compare that order between ranks."""
    groups = {name: list(_world.pg_group_ranks[group]) for group, name in _world.pg_names.items()}
    return _world.group_count, groups


def place_in_batch() -> int | None:
    """The place of this operation in the current `batch_isend_irecv`, from 0; None outside of one. Without
    its two local variables: sends and receives count as issued one by one."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not dist.batch_isend_irecv.__code__:
        frame = frame.f_back
    if frame is None:
        return None
    here = frame.f_locals
    return next(i for i, op in enumerate(here["p2p_op_list"]) if op is here["p2p_op"])


def optimizer_factory(
    container: type[OptimizersContainer], name: str
) -> Callable[..., torch.optim.Optimizer]:
    """What makes the optimizer of a name; NotImplementedError if torchtitan does not know it. Without it:
    `getattr(torch.optim, name)`."""
    return container._resolve_optimizer_factory(name)
