"""The private names of torch and torchtitan that the runtime uses are as they were when it was written.

A failure after an upgrade names what changed; wlb_titan/runtime/compat.py says what it is for and what to do.
"""

import ast
import hashlib
import importlib.util
import inspect
import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from toys import Apart, Twins

from wlb_titan.cost.degrees import Degrees
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

import torch  # noqa: E402
import torch.distributed.pipelining.stage as stage_module  # noqa: E402
import torchtitan  # noqa: E402
import torchtitan.distributed.pipeline_parallel as titan_pipeline  # noqa: E402
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent  # noqa: E402
from torch.distributed.pipelining import PipelineStage  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import init_fake_mode  # noqa: E402
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402
from wlb_titan.launch import elastic  # noqa: E402

from wlb_titan.runtime import compat, log  # noqa: E402
from wlb_titan.runtime.meshes import Dims  # noqa: E402
from wlb_titan.runtime.models import adoption  # noqa: E402

pytestmark = pytest.mark.slow

PARAMETERS = {
    "AsyncCollectiveTensor": "elem",
    "DataDependentOutputException": "func",
    "FakeTensor": (
        "fake_mode_or_elem elem device constant real_tensor pytype dispatch_keys fake_mode fake_device "
        "_fake_device requires_grad _is_param state"
    ),
    "FakeTensorMode": "allow_fallback_kernels allow_non_fake_inputs shape_env static_shapes export",
    "ComputationType": "value names module qualname type start boundary",
    "CustomGraphPass": "",
    "PipelineSchedule": (
        "n_microbatches loss_fn args_chunk_spec kwargs_chunk_spec output_merge_spec scale_grads"
    ),
    "PipelineScheduleRuntime": "args kwargs",
    "RecvInfo": "input_name source tensor_meta is_root_arg",
    "ScheduleAction": "stage_index computation_type microbatch_index sub_actions",
    "StageMeta": "inputs outputs input_grads output_grads",
    "TensorMeta": "shape stride dtype requires_grad",
    "all_to_all_single_autograd": "self output_split_sizes input_split_sizes group tag",
    "build_pipeline_schedule": "parallelism local_batch_size stages loss_fn backward_requires_autograd",
    "checkpoint_wrapper": "module checkpoint_impl checkpoint_fn checkpoint_fn_kwargs",
    "ensure_receives_drained": "recv_info_by_microbatch",
    "fake_group": "store rank size",
    "get_custom_graph_passes": "custom_pass",
    "groups_made": "",
    "in_backward_pass": "",
    "mark_unbacked": "t index hint_override strict specialize_on shape_id min max",
    "metrics_rank_of": "parallel_dims pp_schedule",
    "modules_of_stages": "num_stages num_layers input_weight output_weight",
    "optimizer_factory": "container name",
    "owner_of": "config",
    "pipeline_metadata": "parallel_dims parallelism model_config",
    "place_in_batch": "",
    "process_groups": "",
    "ranks_of_group": "name",
    "split_into_stages": "whole_model pp_mesh pp_schedule device module_names_per_stage get_mesh",
    "unset_fake_temporarily": "",
}
OVERRIDDEN = {
    PipelineStage: {
        "forward_one_chunk": "self fwd_chunk_id args kwargs save_forward_output",
        "backward_one_chunk": "self bwd_chunk_id loss full_backward last_backward",
        "backward_weight_one_chunk": "self bwd_chunk_id last_backward",
        "backward_maybe_with_nosync": "self backward_type bwd_kwargs last_backward",
        "get_bwd_send_ops": "self bwd_chunk_id",
        "get_fwd_send_ops": "self fwd_chunk_id",
        "release_fwd_send_outputs": "self fwd_chunk_id",
        "_retrieve_recv_activations": "self fwd_chunk_id",
        "clear_runtime_states": "self",
        "get_local_bwd_output": "self mb_index",
        "set_local_bwd_input": "self next_stage_bwd_outputs mb_index",
        "_prepare_forward_infra": "self num_microbatches args kwargs has_backward",
        "_prepare_backward_infra": "self num_microbatches loss_fn target received_grad_meta loss_kwargs",
        "_pre_metadata_inference_backup": "self",
        "_post_metadata_inference_cleanup": "self",
    },
    compat.PipelineScheduleRuntime: {
        "_maybe_compute_loss": "self stage output target_mbs mb_index loss_kwargs",
        "_maybe_get_loss": "self stage mb_index",
        "_compute_loss": "self output target loss_kwargs",
        "_initialize_stages": "self args kwargs target loss_kwargs",
    },
    LocalElasticAgent: {
        "_stop_workers": "self worker_group",
        "_monitor_workers": "self worker_group",
        "_shutdown": "self death_sig timeout",
        "_exit_barrier": "self",
    },
    AllToAllTokenDispatcher: {
        "_sync_token_count_exchange": (
            "self num_local_tokens_per_expert_E num_global_tokens_per_local_expert_EP_e ep_size"
        )
    },
}
"""Private methods that ours override or call, by class."""
OF_STAGE = (
    *("args_recv_info", "grad_recv_info", "act_send_info", "chunks", "_stage_meta", "_runtime_validate"),
    *("_user_meta", "_inference_mode", "_forward_chunk_states"),
)
OF_AGENT = ("_worker_group", "_pcontext", "_remaining_restarts", "_exit_barrier_timeout")
"""Private attributes that ours set, or read."""
# Whole functions that ours take the place of: a new version may do more in them.
REPLACED = {
    "Trainer.train_step": (Trainer.train_step, "911f8077fc17"),
    "Trainer.forward_backward_step": (Trainer.forward_backward_step, "c7b14c5ae60b"),
    "Trainer.pp_forward_backward_step": (Trainer.pp_forward_backward_step, "cabc5cbf434e"),
    "Trainer.batch_generator": (Trainer.batch_generator, "8e05c5915a0a"),
    "Trainer.init_distributed": (Trainer.init_distributed, "a114825fc699"),
    "ParallelDims.build_mesh": (ParallelDims.build_mesh, "998e974093ad"),
    "Validator.validate": (Validator.validate, "36d6da077e3f"),
    "pipeline_llm": (titan_pipeline.pipeline_llm, "b69a9f5b0c9f"),
}


def parameters(function) -> str:
    return " ".join(inspect.signature(function).parameters)


@pytest.fixture
def ranks():
    """A process group of 64 ranks, of which this is one, without the others."""
    init_fake_mode(64, rank=37)
    yield 64
    torch.distributed.destroy_process_group()


DEGREES = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}


def test_meshes_of_own_dimensions_without_one_are_torchtitan_s(ranks):
    degrees = DEGREES | {"dp_shard": 4, "ep": 4}
    theirs, ours = (kind(**degrees, world_size=ranks) for kind in (ParallelDims, Dims))
    theirs.build_mesh()
    ours.build_open_mesh()
    assert theirs._single_axis_meshes.keys() == ours._single_axis_meshes.keys()
    assert theirs._global_meshes.keys() == ours._global_meshes.keys()
    for kind in ("_single_axis_meshes", "_global_meshes"):
        for name, mesh in getattr(theirs, kind).items():
            own = getattr(ours, kind)[name]
            assert own.mesh_dim_names == mesh.mesh_dim_names and torch.equal(own.mesh, mesh.mesh), name
    assert ours.spmd_meshes() == theirs.spmd_meshes()


def test_a_dimension_lies_where_its_class_says(ranks):
    twins, apart = Twins.Config(degree=2).make(), Apart.Config(degree=2).make()
    dims = Dims(**DEGREES | {"dp_replicate": 1}, ep=1, world_size=ranks, own=(apart, twins))
    dims.build_mesh()
    layout = Degrees(pipeline=2, shard=2, context=2, tensor=2, own=(apart.config, twins.config))
    assert list(layout.layout) == ["pp", "apart", "dp_replicate", "dp_shard", "cp", "twins", "tp"]
    everyone = np.arange(ranks).reshape(list(layout.layout.values()))
    place = np.argwhere(everyone == 37)[0]
    for number, axis in enumerate(layout.layout):
        mine = np.moveaxis(everyone, number, 0)[(slice(None), *np.delete(place, number))]
        assert dims._single_axis_meshes[axis].mesh.tolist() == mine.tolist(), axis
        assert len(mine) == 1 or layout.strides[axis] == mine[1] - mine[0]
    data = everyone[place[0], :, 0, :, place[4], place[5], place[6]]
    assert dims.get_mesh("batch").mesh.tolist() == data.ravel().tolist()
    assert dims.get_mesh("loss").size() == 8  # apart, dp_shard, cp


def test_every_private_name_is_in_the_contract():
    """All that others take from compat.py."""
    files = (Path(compat.__file__).parent).rglob("*.py")
    trees = (ast.walk(ast.parse(file.read_text())) for file in files)
    taken = [node for node in chain.from_iterable(trees) if isinstance(node, ast.ImportFrom)]
    names = {one.name for node in taken if node.module == compat.__name__ for one in node.names}
    assert PARAMETERS.keys() == names


@pytest.mark.parametrize("name", PARAMETERS)
def test_private_names_take_what_they_took(name):
    assert parameters(getattr(compat, name)) == PARAMETERS[name]


def test_a_configuration_knows_what_it_builds():
    assert compat.owner_of(Validator.Config(steps=1)) is Validator


@pytest.mark.parametrize("kind", OVERRIDDEN, ids=lambda kind: kind.__name__)
def test_overridden_methods_take_what_they_took(kind):
    assert {name: parameters(getattr(kind, name)) for name in OVERRIDDEN[kind]} == OVERRIDDEN[kind]


def reads(source, name):
    return re.search(rf"self\.{name}\b", source) is not None


def test_private_attributes_are_still_read():
    agent = "".join(inspect.getsource(kind) for kind in LocalElasticAgent.__mro__[:2])
    assert [name for name in OF_AGENT if not reads(agent, name)] == []
    stage = inspect.getsource(stage_module)
    assert [name for name in OF_STAGE if not reads(stage, name)] == []
    assert "self._internal_losses.append" in inspect.getsource(compat.PipelineSchedule)
    assert not Decoder._skip_lm_head


def test_every_private_member_of_the_agent_is_in_the_contract():
    tree = ast.parse(inspect.getsource(elastic))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    theirs = "".join(inspect.getsource(kind) for kind in LocalElasticAgent.__mro__[:2])
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    known = {*OF_AGENT, *OVERRIDDEN[LocalElasticAgent]}
    assert {name for name in private if reads(theirs, name)} == known


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_functions_are_what_they_were(name):
    function, digest = REPLACED[name]
    source = inspect.getsource(function)
    assert hashlib.sha256(source.encode()).hexdigest()[:12] == digest, (
        f"torchtitan's {name} is not what ours was written against: compare the two, then renew the digest"
    )


def test_classes_and_modules_of_models_that_are_named_exist():
    names = [*adoption.ATTENTION_CLASSES, *adoption.ONLY_WINDOWS, *adoption.REFUSED_MODULES, adoption.LORA]
    for name in names:
        module, _, qualified_name = name.partition(":")
        assert importlib.util.find_spec(module) is not None, name
        assert not qualified_name or hasattr(importlib.import_module(module), qualified_name), name


def test_messages_that_are_left_out_of_the_log_are_still_written():
    sources = Path(torchtitan.__path__[0]).rglob("*.py")
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    for message in log.DROPPED:
        assert message.removeprefix("CPU ") in text, message  # which stands for the device
