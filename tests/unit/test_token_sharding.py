"""Data parallelism shards the tokens of every activation of a model, and no parameter."""

import dataclasses
from unittest.mock import Mock

import pytest

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

import spmd_types as spmd  # noqa: E402
import torch  # noqa: E402
from torchtitan.distributed.parallel_dims import MeshAxisName  # noqa: E402
from torchtitan.models.llama3.sharding import set_llama3_sharding_config  # noqa: E402
from torchtitan.protocols.sharding import SpmdLayout  # noqa: E402

from wlb_titan.runtime.models import llama_spec  # noqa: E402
from wlb_titan.runtime.token_sharding import shard_tokens  # noqa: E402

DP, CP = MeshAxisName.DP, MeshAxisName.CP


def layouts_in(value):
    """All layouts within dicts, tuples and dataclasses."""
    if isinstance(value, SpmdLayout):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from layouts_in(each)
    elif isinstance(value, tuple):
        for each in value:
            yield from layouts_in(each)
    elif dataclasses.is_dataclass(value):
        yield from layouts_in(tuple(getattr(value, field.name) for field in dataclasses.fields(value)))


@pytest.mark.parametrize("enable_sp", [True, False])
def test_activations_of_every_module(enable_sp):
    spec = llama_spec("debug")
    set_llama3_sharding_config(spec.model, enable_sp=enable_sp)
    with torch.device("meta"):
        model = spec.model.build()
    parallelize = Mock()
    spec = shard_tokens(dataclasses.replace(spec, parallelize_fn=parallelize))
    spec.parallelize_fn(model, dump_folder="here")
    parallelize.assert_called_once_with(model, dump_folder="here")

    configs = [module._sharding_config for module in model.modules() if module._sharding_config is not None]
    assert len(configs) > 4 * 8  # layers and the modules in them
    for config in configs:
        for layout in layouts_in(config.state_shardings):
            assert layout.per_axis_spmd_types()[DP] == spmd.R
        activations = dataclasses.replace(config, state_shardings={})
        for layout in layouts_in(activations):
            types = layout.per_axis_spmd_types()
            assert types[DP] == spmd.S(1)
            assert types[CP] in (spmd.S(1), spmd.R, spmd.P)  # gathered keys, and their gradients
            assert layout.axes() == tuple(layout.axis_types)
