"""Peak memory by hand: a model of round numbers, each schedule's micro-batches in flight, each term."""

import planning
import pytest
from planning import FULL, MODEL, NONE, job

from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.errors import PlanError
from wlb_titan.memory.fits import USABLE, Fitting
from wlb_titan.memory.layer import MemorySettings, TokenBytes
from wlb_titan.memory.rank import GIB, Passes
from wlb_titan.pipeline.schedule import layers_of_stages

LAYER = planning.LAYER + 2 * 8  # weights of one: attention, MLP, norms


def memory_job(model, degrees, settings=None, layers=(), **changes):
    """Selective checkpointing, and layers as torchtitan divides them, if nothing else is said."""
    facts = {"model": model, "degrees": degrees, "memory": settings or MemorySettings(), **changes}
    number = degrees.data * (facts.get("run") or 1)
    return job(stage_layers=tuple(layers), window=1024, micro_batches=number, multiple=32, **facts)


def pipeline_memory(model, degrees, lengths, **job):
    """The peaks of a replica's micro-batches of these lengths."""
    return Fitting(memory_job(model, degrees, **job), 0.0).peak(Passes.of(lengths))


def peak_tokens(schedule, lengths, ranks=4, chunks=1):
    """Tokens in flight, in thousands, for stages of one layer."""
    memory = pipeline_memory(
        MODEL,
        Degrees(pipeline=ranks),
        [1000 * length for length in lengths],  # so that weights do not matter
        schedule=schedule,
        chunks=chunks,
        settings=NONE,
        layers=[1] * (ranks * chunks),
    )
    return [rank.tokens / 1000 for rank in memory]


def test_micro_batches_in_flight():
    lengths = [10, 20, 30, 40, 50]
    assert peak_tokens("GPipe", lengths) == [150] * 4
    # 1F1B: rank r holds up to 4 - r at a time, the largest neighbours of that many.
    assert peak_tokens("1F1B", lengths) == [140, 120, 90, 50]
    assert peak_tokens("1F1B", [50, 10, 10, 10], ranks=2) == [60, 50]
    # Rank 0 of 2 with 2 chunks starts (2 - 1) 2 + 2 = 4 forward passes, and one more before the first B.
    assert peak_tokens("Interleaved1F1B", [8] * 4, ranks=2, chunks=2) == [5 * 8, 3 * 8]


def test_terms_by_hand():
    settings = MemorySettings(checkpointing="full", loss_chunks=2, window=64)
    degrees = Degrees(tensor=2, context=2, pipeline=2, shard=2)
    first, last = pipeline_memory(MODEL, degrees, [64, 64], settings=settings, layers=[2, 2])
    weights = 2 * LAYER + 8 * 32  # and the embedding
    assert first.parameters == weights
    assert last.parameters == weights + 8  # the head, and the last norm
    shard = weights / (2 * 2 * 2)  # TP x CP x FSDP
    assert (first.weights, first.optimizer) == (4 * shard, 8 * shard)
    assert first.gradients == 0  # they are reduced after the peak
    assert first.rotary == 2 * 64 * 4 * 4  # layers, positions, complex in float32 of half the head dim
    # Whole weights in bfloat16, and one weight's gradient in bfloat16 and float32. The second backward pass
    # is the fullest here, as tokens are few: the whole gradients of the first are there, in float32.
    assert first.gathered == weights / 2 * (2 + 4) + 8 * 16 / 2 * (2 + 4)
    # The inputs of two layers and the stage's output, sharded by TP; and int64 inputs, of both micro-batches.
    assert first.activations == 64 * (3 * 8 * 2 / 4) + 2 * 64 * (3 * 8 / 2 + 8)
    g, q, f = 8 * 2 / 2, 8 * 2 / 4, 16 * 2 / 4
    keys = 2 * 8 * 2 / 2
    log_sum_exp, rotary = 4 * 2 / 4, 4 * 4 / 2
    # The fullest moment is the gradient of silu, with w1's output, attention's output and q made again.
    moments = (4 * g, 3 * g + 5 * f, 4 * g + 4 * f, 2 * g + 6 * f, 4 * g + 2 * f, g + 2 * q + keys)
    assert max(moments) == 2 * g + 6 * f == 4 * g + 4 * f
    at_hand = 2 * g / 2 + q + rotary + q + log_sum_exp + keys + max(moments)
    assert first.backward == 64 * at_hand
    assert first.loss == 0
    # The last stage's output is gathered; the last norm's input, the input of a micro-batch that is done and
    # its gradient are kept. Its head's gradient is reduced at each micro-batch.
    hidden = 64 * 8 * 2 / 4
    assert last.activations == first.activations + 64 * 8 * 2 / 2 - hidden + hidden + 2 * hidden
    assert last.gathered == first.gathered + 8 / 2 * (2 + 4) + 8 * 32 / 2 * 4 * (2 / 4)
    assert first.total == sum(
        (first.weights, first.optimizer, first.rotary, first.gathered, first.activations, first.backward)
    )


def test_gradients_are_there_once_they_were_reduced():
    """Without a pipeline after the first micro-batch; whole ones from a stage's first backward pass on."""
    alone = [pipeline_memory(MODEL, Degrees(shard=2), [64] * n, settings=FULL)[0] for n in (1, 2)]
    assert [one.gradients for one in alone] == [0, alone[0].weights]
    few, many = (
        pipeline_memory(MODEL, Degrees(pipeline=2), [n] * 2, settings=FULL, layers=[2, 2])[0]
        for n in (64, 64000)
    )
    assert few.gathered - many.gathered == 4 * few.parameters
    assert (few.tokens, many.tokens) == (64, 2 * 64000)


@pytest.mark.parametrize("tp", [1, 2])
def test_checkpointing_keeps_less_of_a_layer(tp):
    kept = [
        TokenBytes.of(MODEL, Degrees(tensor=tp), MemorySettings(checkpointing=kind)).kept
        for kind in ("none", "selective", "full")
    ]
    assert kept[0] > kept[1] > kept[2] == 8 * 2 / tp  # the hidden state in bfloat16, of this rank's tokens


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_activations_grow_with_tokens_and_weights_shrink_with_shards(pipeline, checkpointing):
    def ranks(length, shard):
        settings = MemorySettings(checkpointing=checkpointing)
        return pipeline_memory(
            MODEL, Degrees(pipeline=pipeline, shard=shard), [length] * 4, settings=settings
        )

    for short, longer, sharded in zip(ranks(64000, 2), ranks(128000, 2), ranks(64000, 4), strict=True):
        for term in ("activations", "backward", "loss"):
            assert getattr(longer, term) == 2 * getattr(short, term)
            assert getattr(sharded, term) == getattr(short, term)
        for term in ("weights", "optimizer", "gradients"):
            assert getattr(longer, term) == getattr(short, term)
            assert 2 * getattr(sharded, term) == pytest.approx(getattr(short, term), abs=1)


def test_keys_and_values_are_those_of_all_context_parallel_ranks():
    """Alone: rotated keys and values. Shared: K and V of all tokens, and a quarter of all else."""
    alone, shared = (TokenBytes.of(MODEL, Degrees(context=cp), NONE) for cp in (1, 4))
    keys = 2 * 8 * 2
    assert shared.kept - keys == pytest.approx((alone.kept - keys) / 4)


def test_activations_wait_for_the_gradients_of_weights():
    """With zero bubble W follow I at a distance; backward passes that recompute are whole."""

    def live(checkpointing):
        settings, lengths = MemorySettings(checkpointing=checkpointing), [64000] * 4
        for schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
            job = {"schedule": schedule, "chunks": 2, "settings": settings}
            yield pipeline_memory(MODEL, Degrees(pipeline=2), lengths, **job)[1]

    whole, split = live("none")
    assert split.tokens == whole.tokens + 64000
    # Beside what four micro-batches in flight keep, gradients of linear layers' outputs wait for W.
    token = TokenBytes.of(MODEL, Degrees(pipeline=2), NONE)
    assert split.activations - whole.activations > 64000 * (token.kept + 2 * token.waiting)
    for checkpointing in ("selective", "full"):
        whole, same = live(checkpointing)
        assert same.tokens == whole.tokens


def test_the_longest_micro_batch_that_fits():
    job = memory_job(MODEL, Degrees())

    def memory(length):
        return Fitting(job, 0.0).peak(Passes.of([length]))[0].total

    assert Fitting(job, memory(2 * 1024)).longest == 2 * 1024  # never more
    tight = Fitting(job, USABLE * memory(1024))  # not even windows leave enough room
    assert tight.longest == 1024 and not tight.windows_fit
    unknown = Fitting(job, USABLE * memory(1024), known=False)
    assert unknown.longest == 2 * 1024 and unknown.windows_fit
    for windows in (1.0, 1.3, 1.77):
        usable = memory(int(windows * 1024))
        longest = Fitting(job, usable).longest
        assert longest % 32 == 0 and memory(longest) <= usable < memory(longest + 32)


def test_the_papers_largest_job_fits_its_gpus_and_says_why():
    degrees = Degrees(tensor=16, context=4, pipeline=4)
    memory = pipeline_memory(PAPER_MODELS["70B"], degrees, [131072] * 4, schedule="1F1B")
    assert memory[0] == max(memory, key=lambda rank: rank.total) and memory[0].total < 80e9
    explained = memory[0].explain()
    assert f"{memory[0].total / GIB:.2f} GiB" in explained
    assert f"{memory[0].tokens:,} tokens in flight" in explained and "loss" not in explained


def test_slices_have_an_order_of_their_own():
    """On 3 ranks Interleaved1F1B cannot run the 16 slices of the imagined document; PackFlow can."""
    job = memory_job(MODEL, Degrees(pipeline=3), schedule="Interleaved1F1B", chunks=2, layers=[1] * 6)
    fitting = Fitting(job, 0.0)
    assert [rank.tokens for rank in fitting.document(1024)] == [2 * 1024] * 3
    with pytest.raises(PlanError, match="16 micro-batches on 3 ranks"):
        fitting.peak(Passes.of([64] * 16))


@pytest.mark.parametrize(
    ("layers", "stages", "expected"), [(32, 4, (8, 9, 8, 7)), (6, 2, (3, 3)), (3, 1, (3,)), (86, 2, (43, 43))]
)
def test_layers_of_stages(layers, stages, expected):
    assert layers_of_stages(layers, stages) == expected


def test_refusals():
    with pytest.raises(PlanError, match=r"2 layers.*8 pipeline stages"):
        layers_of_stages(2, 8)
    with pytest.raises(PlanError, match="DualPipeV"):
        pipeline_memory(MODEL, Degrees(pipeline=2), [8] * 4, schedule="DualPipeV", chunks=2)
