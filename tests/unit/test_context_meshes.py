"""Every rank makes the same process groups, also those of ranks that share without it."""

import pytest
import torch.distributed as dist
from torchtitan.distributed.utils import init_fake_mode

from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.job import Job
from wlb_titan.packing import POLICIES
from wlb_titan.runtime.meshes import Dims, context_meshes

pytestmark = pytest.mark.slow

SLIM = POLICIES.configure("slim", dp_merge=True)
IN_ROW, HYBRID = map(STRATEGIES.configure, ("per_sequence", "hybrid"))
TWO_AXES = STRATEGIES.configure("own_policies.ulysses_gather:UlyssesGather", within=2)
CASES = {
    "nobody for the last rank": (Degrees(shard=3), SLIM, IN_ROW),
    "pipeline": (Degrees(pipeline=2, shard=6, tensor=2), SLIM, IN_ROW),
    "levels": (Degrees(shard=3, context=4), SLIM, HYBRID),
    "two axes": (Degrees(pipeline=2, context=4), POLICIES.configure("plain"), TWO_AXES),
}


def made(rank, degrees, packing, sharding):
    """The ranks of a rank's meshes, and how many groups it took part in making."""
    job = Job(window=4096, micro_batches=12, degrees=degrees, packing=packing, context=sharding)
    init_fake_mode(degrees.ranks, rank=rank)
    sizes = {"cp": degrees.context, "tp": degrees.tensor, "pp": degrees.pipeline, "ep": 1}
    dims = Dims(dp_replicate=1, dp_shard=degrees.shard, world_size=degrees.ranks, **sizes)
    dims.build_mesh()
    meshes = context_meshes(job, dims, {})
    ranks = {sharers: [mesh.mesh.tolist() for mesh in own] for sharers, own in meshes.items()}
    groups = dist.distributed_c10d._world.group_count
    dist.destroy_process_group()
    return ranks, groups


@pytest.fixture(scope="module")
def ranks():
    """Of each case what each rank has made."""
    return {name: [made(rank, *case) for rank in range(case[0].ranks)] for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_take_part_in_making_all_groups(ranks, name):
    assert len({groups for _, groups in ranks[name]}) == 1


def test_ranks_are_in_the_groups_that_they_attend_with(ranks):
    assert [meshes for meshes, _ in ranks["nobody for the last rank"]] == [{2: [[0, 1]]}] * 2 + [{}]
    # pp 2, dp 6, tp 2
    assert ranks["pipeline"][0][0] == {2: [[0, 2]], 4: [[0, 2, 4, 6]]}
    assert ranks["pipeline"][12 + 9][0] == {2: [[21, 23]]}
    assert ranks["levels"][6][0] == {1: [[6, 7], [4, 5, 6, 7]], 2: [[6, 7], list(range(8))]}
    assert ranks["levels"][10][0] == {1: [[10, 11], [8, 9, 10, 11]]}
    assert ranks["two axes"][6][0] == {1: [[[4, 5], [6, 7]]]}
