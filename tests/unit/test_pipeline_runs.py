"""The order setting: every pack runs once, runs stay together, ranks stay alike, and the plan shows it."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from wlb_titan.commands.main import main
from wlb_titan.errors import PlanError
from wlb_titan.pipeline.graph import PipelineGraph
from wlb_titan.pipeline.order import ORDERS, arranged
from wlb_titan.pipeline.schedule import PipelineShape

SHAPE = PipelineShape("1F1B", 2)
FORWARD = np.random.default_rng(0).lognormal(0.0, 0.8, size=16)
BACKWARD = 2 * FORWARD
PACKED = [list(range(8)), list(range(8, 16))]  # of two data-parallel ranks


def in_runs(run, order, packed=PACKED):
    return arranged(ORDERS.configure(order).make(SHAPE), run, packed, FORWARD, BACKWARD)


@pytest.mark.parametrize("order", ORDERS.names)
def test_every_rank_keeps_the_packs_of_each_run(order):
    found = in_runs(4, order)
    for packed, mine in zip(PACKED, found, strict=True):
        assert sorted(mine[:4]) == packed[:4]
        assert sorted(mine[4:]) == packed[4:]
    assert (found == PACKED) == (order == "as_packed")


@pytest.mark.parametrize("order", ["longest_first", "shortest_first", "best"])
def test_the_kth_longest_of_every_rank_runs_at_the_same_place(order):
    first, second = (np.argsort(FORWARD[packs]) for packs in in_runs(8, order))
    assert first.tolist() == second.tolist()


def test_best_is_predicted_to_be_no_slower():
    (best,) = in_runs(8, "best", PACKED[:1])
    times = PipelineGraph(SHAPE, 8).step_times(FORWARD[:8], BACKWARD[:8], np.array([PACKED[0], best]))
    assert times[1] < times[0]


def test_refusals():
    with pytest.raises(PlanError, match=r"8 micro-batches .* runs of 3"):
        in_runs(3, "as_packed")


def planned(tmp_path, *options):
    """The micro-batches of 5 steps by (iteration, rank): (first document, work) of each, in order."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(map(str, np.random.default_rng(1).integers(5, 256, 4000))) + "\n")
    file, output = tmp_path / "job.toml", tmp_path / "plan.jsonl"
    file.write_text('base = "llama3_debug"\n')
    words = ["--training.seq_len", "256", "--training.local_batch_size", "8", "--steps", "5"]
    words += ["--parallelism.data_parallel_shard_degree", "2", "--parallelism.pipeline_parallel_degree", "2"]
    words += ["--parallelism.context_parallel_degree", "1", "--wlb.packing.cost_model", "quadratic:1,10"]
    words += ["--output", str(output)]
    result = CliRunner().invoke(main, ["plan", str(file), "--lengths", str(lengths), *words, *options])
    assert result.exit_code == 0, result.output
    plans = [json.loads(line) for line in output.read_text().splitlines()]
    return {
        (plan["iteration"], rank): [
            (m["documents"][0]["id"], m["workload"]) for m in plan["micro_batches"] if m["dp_rank"] == rank
        ]
        for plan in plans
        for rank in range(2)
    }


@pytest.mark.parametrize("policy", ["plain", "wlb_lazy"])
def test_the_order_of_a_plan(tmp_path, policy):
    as_packed = planned(tmp_path, "--wlb.packing.policy", policy)
    for order in ORDERS.names[1:]:
        ordered = planned(tmp_path, "--wlb.packing.policy", policy, "--wlb.pipeline.order", order)
        assert {key: sorted(run) for key, run in ordered.items()} == {
            key: sorted(run) for key, run in as_packed.items()
        }
        works = [[work for _, work in run] for run in ordered.values()]
        if order == "longest_first":
            assert all(work == sorted(work, reverse=True) for work in works)
        if order == "shortest_first":
            assert all(work == sorted(work) for work in works)
