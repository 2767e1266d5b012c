"""The private names of torch and torchtitan that the runtime uses are as they were when it was written. What
fails after an upgrade has changed; wlb_titan/runtime/compat.py says what it is for and what to do."""

import ast
import functools
import hashlib
import importlib.util
import inspect
import queue
import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torchtitan
import torchtitan.distributed.pipeline_parallel as titan_pipeline
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.checkpointer.base import purge_thread
from torchtitan.components.validate import Validator
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import init_fake_mode
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection, get_peak_flops
from torchtitan.trainer import Trainer
from toys import Apart, Twins
from wlb_titan.launch.elastic import Agent

from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.runtime import compat
from wlb_titan.runtime.meshes import Dims
from wlb_titan.runtime.metrics import MISLEADING, drop_misleading_warnings
from wlb_titan.runtime.models import adoption
from wlb_titan.runtime.pipeline.regroup import RegroupedSchedule, RegroupedStage

pytestmark = pytest.mark.slow

OURS = (RegroupedStage, RegroupedSchedule, Agent, Dims)
OTHERS = (AllToAllTokenDispatcher, CheckpointWrapper, Decoder, DeviceMesh)
"""Classes whose private members compat.py lists: of ours, those of what they derive from."""
# Whole functions that ours take the place of: a new version may do more in them.
REPLACED = {
    Trainer.train_step: "911f8077fc17",
    Trainer.forward_backward_step: "c7b14c5ae60b",
    Trainer.pp_forward_backward_step: "cabc5cbf434e",
    Trainer.batch_generator: "8e05c5915a0a",
    Trainer.init_distributed: "a114825fc699",
    ParallelDims.build_mesh: "998e974093ad",
    Validator.validate: "36d6da077e3f",
    titan_pipeline.pipeline_llm: "b69a9f5b0c9f",
}


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

    def drawn(meshes):
        return {name: (mesh.mesh_dim_names, mesh.mesh.tolist()) for name, mesh in meshes.items()}

    assert drawn(ours._single_axis_meshes) == drawn(theirs._single_axis_meshes)
    assert drawn(ours._global_meshes) == drawn(theirs._global_meshes)
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


def bind(function, call, *before):
    """Raises a TypeError if the function does not take what is written in the call."""
    given = [None for one in call.args if not isinstance(one, ast.Starred)]
    named = {one.arg: None for one in call.keywords if one.arg is not None}
    is_whole = len(given) + len(named) == len(call.args) + len(call.keywords)
    signature = inspect.signature(function)
    (signature.bind if is_whole else signature.bind_partial)(*before, *given, **named)


def calls(source):
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]


def test_private_names_take_what_they_are_given_and_owners_are_known():
    files = [file for file in Path(compat.__file__).parent.rglob("*.py") if file.name != "compat.py"]
    found = [call for file in files for call in calls(file.read_text())]
    named = [call for call in found if isinstance(call.func, ast.Name) and hasattr(compat, call.func.id)]
    assert len(named) > 20
    for call in named:
        bind(getattr(compat, call.func.id), call)
    assert compat.owner_of(Validator.Config(steps=1)) is Validator


def ours_and_theirs(kind):
    """The classes of the project that a class consists of, and the first that is not."""
    ours = [one for one in kind.__mro__ if one.__module__.startswith("wlb_titan")]
    return ours, kind.__mro__[len(ours)]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_overridden_methods_take_what_theirs_take(kind):
    ours, theirs = ours_and_theirs(kind)
    for one in ours:
        for name, method in inspect.getmembers(theirs, inspect.isfunction):
            if name in vars(one) and not name.startswith("__"):
                given = dict.fromkeys(inspect.signature(method).parameters)
                inspect.signature(vars(one)[name]).bind(**given)


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_inherited_methods_take_what_they_are_given(kind):
    ours, theirs = ours_and_theirs(kind)
    for one in ours:
        for call in calls(inspect.getsource(one)):
            match call.func:
                case ast.Attribute(value=ast.Call(func=ast.Name("super")), attr=name):
                    bind(getattr(theirs if hasattr(theirs, name) else super(one, kind), name), call, None)
                case ast.Attribute(value=ast.Name("self"), attr=name) if hasattr(kind, name):
                    bind(getattr(kind, name), call, None)


@functools.cache
def source_of(kind):
    return "".join(inspect.getsource(one) for one in kind.__mro__[:-1])


def has(kind, name):
    return re.search(rf"(self\.|def |^    ){name}\b", source_of(kind), re.MULTILINE) is not None


def listed():
    """Name of a class, and of a member, of those that compat.py lists."""
    owner = ""
    for item in re.findall(r"^- (.*?): ", compat.__doc__, re.MULTILINE | re.DOTALL):
        for word in re.findall(r"`([\w.]+)`", item):
            kind, _, name = word.rpartition(".")
            owner = kind or owner
            yield owner, name


def test_private_members_are_still_there():
    kinds = chain.from_iterable(kind.__mro__ for kind in (*OURS, *OTHERS))
    by_name = {kind.__name__: kind for kind in kinds}
    assert [(owner, name) for owner, name in listed() if not has(by_name[owner], name)] == []


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_private_member_that_ours_use_is_listed(kind):
    ours, theirs = ours_and_theirs(kind)
    nodes = [node for one in ours for node in ast.walk(ast.parse(inspect.getsource(one)))]
    used = {getattr(node, "attr", getattr(node, "name", None)) or "" for node in nodes}
    private = {name for name in used if re.match("_[a-z]", name) and has(theirs, name)}
    assert private <= {name for _, name in listed()}


@pytest.mark.parametrize("function", REPLACED, ids=lambda function: function.__qualname__)
def test_replaced_functions_are_what_they_were(function):
    digest = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12]
    assert digest == REPLACED[function], "ours was written against another: compare the two, then renew this"


def test_classes_modules_and_messages_that_are_named_exist():
    names = [*adoption.ONLY_WINDOWS, *adoption.REFUSED_MODULES, adoption.LORA]
    for name in names:
        module, _, qualified_name = name.partition(":")
        assert importlib.util.find_spec(module) is not None, name
        assert not qualified_name or hasattr(importlib.import_module(module), qualified_name), name
    sources = Path(torchtitan.__path__[0]).rglob("*.py")
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    for message in MISLEADING:
        assert message in text, message


def test_torchtitan_says_what_goes_wrong_and_what_becomes_of_checkpoints(caplog):
    drop_misleading_warnings()
    caplog.set_level("INFO")
    GarbageCollection.collect("now")
    get_peak_flops("a CPU")
    purged = queue.SimpleQueue()
    purged.put(None)
    purge_thread(purged, print)
    logger.info("ours")
    assert caplog.messages == ["Destroying the purge thread.", "ours"]
