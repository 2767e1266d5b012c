"""Peak memory by hand: a model of round numbers, each schedule's micro-batches in flight, each term."""

import pytest

from wlb_titan.planner.analytic import PAPER_MODELS, ModelShape
from wlb_titan.planner.degrees import Degrees
from wlb_titan.planner.errors import PlanError
from wlb_titan.planner.memory import GIB, MemorySettings, layers_of_stages, pipeline_memory

MODEL = ModelShape(layers=4, hidden=8, heads=2, kv_heads=1, head_dim=4, feed_forward=16, vocabulary=32)
LAYER = 8 * 4 * (2 * 2 + 2) + 3 * 8 * 16 + 2 * 8  # weights of one: attention, MLP, norms


def peak_tokens(schedule, lengths, ranks=4, chunks=1):
    """Tokens in flight, for stages of one layer."""
    memory = pipeline_memory(
        MODEL,
        Degrees(pipeline=ranks),
        lengths,
        schedule=schedule,
        chunks=chunks,
        layers=[1] * (ranks * chunks),
    )
    return [rank.tokens for rank in memory]


def test_micro_batches_in_flight():
    lengths = [10, 20, 30, 40, 50]
    assert peak_tokens("GPipe", lengths) == [150] * 4
    # 1F1B: rank r holds up to 4 - r at a time, the largest neighbours of that many.
    assert peak_tokens("1F1B", lengths) == [140, 120, 90, 50]
    assert peak_tokens("1F1B", [50, 10, 10, 10], ranks=2) == [60, 50]


def test_interleaved_stages_hold_more():
    # Rank 0 of 2 with 2 chunks starts (2 - 1) 2 + 2 = 4 forward passes, and one more before the first B.
    assert peak_tokens("Interleaved1F1B", [8] * 4, ranks=2, chunks=2) == [5 * 8, 3 * 8]
    # ZBV holds as much on every rank.
    assert len(set(peak_tokens("ZBVZeroBubble", [8] * 8, ranks=2, chunks=2))) == 1


def test_terms_by_hand():
    settings = MemorySettings(checkpointing="full", loss_chunks=2)
    degrees = Degrees(tensor=2, context=2, pipeline=2, shard=2)
    first, last = pipeline_memory(MODEL, degrees, [64, 64], settings=settings, layers=[2, 2])
    weights = 2 * LAYER + 8 * 32  # and the embedding
    assert first.parameters == weights
    assert last.parameters == weights + 8  # the head, and the last norm
    shard = weights / (2 * 2 * 2)  # TP x CP x FSDP
    assert (first.weights, first.gradients, first.optimizer) == (4 * shard, 4 * shard, 8 * shard)
    assert first.gathered == weights / 2 * (2 + 4)
    assert first.activations == 2 * (64 // 2) * 2 * (8 // 2) * 2  # micro-batches, tokens, layers, hidden
    assert last.activations == first.activations / 2
    assert first.keys_values == 2 * (2 * 4 / 2) * 2 * 64  # two copies of K and V of the whole sequence
    none = (2 * 8 + 2 * 8 + 4 * 16) / 2 + 2 * 8
    assert first.recomputation == (none * 2 + 4 * 2 / 2) * 64 / 2
    assert first.backward == 2 * (8 + 16 / 2) * 2 * 64 / 2
    assert (first.loss, last.loss) == (0, 64 / 2 / 2 * 32 / 2 * (2 + 4 + 4))
    assert first.total == sum(
        (first.weights, first.gradients, first.optimizer, first.gathered, first.activations)
    ) + sum((first.keys_values, first.recomputation, first.backward, first.loss))


@pytest.mark.parametrize(
    ("checkpointing", "elements"),
    [("none", 4 * 8 + 2 * 8 + 4 * 16), ("selective", 2 * 8 + 2 * 8 + 4 + 16), ("full", 8)],
)
def test_activations_of_a_token(checkpointing, elements):
    (one,) = pipeline_memory(MODEL, Degrees(), [128], settings=MemorySettings(checkpointing=checkpointing))
    log_sum_exp = 4 * 2 if checkpointing != "full" else 0
    assert one.activations == 4 * 128 * (elements * 2 + log_sum_exp)


def test_keys_without_checkpointing_are_those_of_all_layers():
    settings = MemorySettings(checkpointing="none")
    (one,) = pipeline_memory(MODEL, Degrees(context=2), [128], settings=settings)
    assert one.keys_values == (4 + 2) * 2 * 4 * 2 * 128


def test_the_papers_largest_job_fits_its_gpus():
    memory = pipeline_memory(
        PAPER_MODELS["70B"], Degrees(tensor=16, context=4, pipeline=4), [131072] * 4, schedule="1F1B"
    )
    assert all(rank.total < 80e9 for rank in memory)
    assert max(memory, key=lambda rank: rank.total).rank == 0
    explained = memory[0].explain()
    assert f"{memory[0].total / GIB:.2f} GiB" in explained
    assert f"{memory[0].tokens:,} tokens in flight" in explained
    assert "loss" not in explained


@pytest.mark.parametrize(
    ("layers", "stages", "expected"), [(32, 4, (8, 9, 8, 7)), (6, 2, (3, 3)), (3, 1, (3,)), (86, 2, (43, 43))]
)
def test_layers_of_stages(layers, stages, expected):
    assert layers_of_stages(layers, stages) == expected


def test_refusals():
    with pytest.raises(PlanError, match=r"2 layers.*8 pipeline stages"):
        layers_of_stages(2, 8)
    with pytest.raises(PlanError, match="'sometimes'"):
        MemorySettings(checkpointing="sometimes")
    with pytest.raises(PlanError, match="DualPipeV"):
        pipeline_memory(MODEL, Degrees(pipeline=2), [8] * 4, schedule="DualPipeV", chunks=2)
    with pytest.raises(PlanError, match="pipeline parallel degree is 0"):
        Degrees(pipeline=0)
    with pytest.raises(PlanError, match=r"TP 2 x CP 1 x PP 3 x DP 1 is 6 GPUs.*has 8"):
        Degrees(tensor=2, pipeline=3).check_ranks(8)
