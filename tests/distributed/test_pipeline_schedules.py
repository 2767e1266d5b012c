"""What is refused is what torch cannot run, and is refused with a reason."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch import nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torchtitan.config import CompileConfig

from wlb_titan.errors import PlanError, UserError
from wlb_titan.pipeline.schedule import SCHEDULES, canonical_name, check_micro_batches
from wlb_titan.runtime.metrics import metrics_rank
from wlb_titan.runtime.model_checks import check_pipeline
from wlb_titan.runtime.models.bases import base_config

V_SHAPED = schedules.ScheduleZBVZeroBubble | schedules.ScheduleDualPipeV


def torch_runs(name, ranks, micro_batches):
    """Whether torch builds the schedule, its receives and sends included; and its number of stages."""
    kind = get_schedule_class(name)
    single = issubclass(kind, PipelineScheduleSingle)
    stages = ranks if single else 2 * ranks
    numbers = range(0, stages, ranks)
    same = {"num_stages": stages, "group_rank": 0, "group_size": ranks, "submod": nn.Identity()}
    mine = [SimpleNamespace(stage_index=i, stage_index_to_group_rank={}, **same) for i in numbers]
    try:
        kind(mine[0] if single else mine, micro_batches, loss_fn=lambda output, target: output)
    except ValueError:
        return False, stages
    return True, stages


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers_of_micro_batches_are_refused_as_torch_would(name, ranks):
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
    for micro_batches in range(1, 14):
        runs, stages = torch_runs(name, ranks, micro_batches)
        with nullcontext() if runs else pytest.raises(PlanError, match=f"{name}.*{micro_batches}"):
            check_micro_batches(name, ranks, stages, micro_batches)


def test_every_concrete_schedule_of_torch_is_known_and_spelled_in_any_case():
    with pytest.raises(ValueError) as error:
        get_schedule_class("none")
    offered = set(str(error.value).split("[")[1].rstrip("]").replace("'", "").split(", "))
    assert offered == {*SCHEDULES, "PipelineScheduleSingle", "PipelineScheduleMulti"}
    assert canonical_name("interleaved1f1b") == "Interleaved1F1B"
    with pytest.raises(ValueError, match=r"'PipelineScheduleSingle'.*GPipe"):
        canonical_name("PipelineScheduleSingle")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_loss_is_reported_by_a_rank_that_has_the_last_stage(name):
    v_shaped = issubclass(get_schedule_class(name), V_SHAPED)
    for spelled in (name, name.lower()):
        dims = SimpleNamespace(pp_enabled=True, pp=2, world_size=8)
        assert metrics_rank(dims, spelled) == (0 if v_shaped else 4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_compiled_model_is_refused_where_the_backward_pass_is_split(name):
    config, dims = base_config("llama3_debug"), SimpleNamespace(pp_enabled=True, pp=2)
    degrees = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": name}
    config.parallelism = replace(config.parallelism, **degrees)
    for enable, components in ((False, ["model", "loss"]), (True, ["loss"]), (True, ["model", "loss"])):
        config.compile = CompileConfig(enable=enable, components=components)
        refused = SCHEDULES[name].splits and enable and "model" in components
        with pytest.raises(UserError, match=f"{name}.*compile") if refused else nullcontext():
            check_pipeline(config, dims)
