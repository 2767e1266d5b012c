"""Peak memory: each schedule's micro-batches in flight, one job's terms by hand, and what changes them."""

from dataclasses import replace

import pytest
from planning import FULL, MODEL, NONE, job

from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.errors import PlanError
from wlb_titan.layers.recompute import MemorySettings
from wlb_titan.memory.fits import USABLE
from wlb_titan.memory.layer import TokenBytes
from wlb_titan.memory.rank import GIB, Passes
from wlb_titan.pipeline.schedule import layers_of_stages

SELECTIVE = MemorySettings()


def memory_job(degrees, settings=SELECTIVE, layers=(), **changes):
    """Layers as torchtitan divides them, if nothing else is said."""
    facts = {"window": 1024, "micro_batches": degrees.data, "multiple": 32, "stage_layers": tuple(layers)}
    return job(degrees=degrees, memory=settings, **facts, **changes)


def pipeline_memory(degrees, lengths, **job):
    """The peaks of a replica's micro-batches of these lengths."""
    return memory_job(degrees, **job).fitting.peak(Passes.of(lengths))


def peak_tokens(schedule, lengths, ranks=4, chunks=1):
    """Tokens in flight, in thousands (so that weights do not matter), for stages of one layer."""
    job = {"schedule": schedule, "chunks": chunks, "settings": NONE, "layers": [1] * (ranks * chunks)}
    memory = pipeline_memory(Degrees(pipeline=ranks), [1000 * length for length in lengths], **job)
    return [rank.tokens / 1000 for rank in memory]


def test_micro_batches_in_flight():
    lengths = [10, 20, 30, 40, 50]
    assert peak_tokens("GPipe", lengths) == [150] * 4
    # 1F1B: rank r holds up to 4 - r at a time, the largest neighbours of that many.
    assert peak_tokens("1F1B", lengths) == [140, 120, 90, 50]
    assert peak_tokens("1F1B", [50, 10, 10, 10], ranks=2) == [60, 50]
    # Rank 0 of 2 with 2 chunks starts (2 - 1) 2 + 2 = 4 forward passes, and one more before the first B.
    assert peak_tokens("Interleaved1F1B", [8] * 4, ranks=2, chunks=2) == [5 * 8, 3 * 8]


def test_activations_and_what_is_gathered_of_one_job_by_hand():
    """Dry runs show the weights, the optimizer's state and the rotary factors."""
    settings = MemorySettings(checkpointing="full", loss_chunks=2, window=64)
    degrees = Degrees(tensor=2, context=2, pipeline=2, shard=2)
    facts = {"model": replace(MODEL, feed_forward=24), "settings": settings, "layers": [2, 2]}
    first, last = pipeline_memory(degrees, [64, 64], **facts)
    # Two layers of attention, MLP and norms, and the embedding.
    weights = 2 * (4 * 8 * 8 + 3 * 8 * 24 + 2 * 8) + 8 * 32
    assert (first.parameters, last.parameters) == (weights, weights + 8)  # the head, and the last norm
    assert (first.gradients, first.loss) == (0, 0)  # gradients are reduced after the peak
    # Whole weights in bfloat16. The second backward pass is the fullest here, as tokens are few: the whole
    # gradients of the first are there, in float32.
    assert first.gathered == weights / 2 * (2 + 4)
    # The inputs of two layers and the stage's output, sharded by TP; and int64 inputs, of both micro-batches.
    assert first.activations == 64 * (3 * 8 * 2 / 4) + 2 * 64 * (3 * 8 / 2 + 8)
    g, q, f = 8 * 2 / 2, 8 * 2 / 4, 24 * 2 / 4
    keys, log_sum_exp, rotary = 2 * 8 * 2 / 2, 4 * 2 / 4, 4 * 4 / 2
    # The fullest moment is the gradient of silu, with w1's output, attention's output and q made again.
    at_hand = 2 * g / 2 + q + rotary + q + log_sum_exp + keys
    assert first.backward == 64 * (at_hand + 2 * g + 6 * f)
    # With fewer tokens it is the gradient of w2, with silu's input instead, until that is added to the sum.
    few = pipeline_memory(degrees, [16, 16], **facts)[0]
    assert few.backward == 16 * (at_hand + 3 * g + 5 * f) + 8 * 24 / 2 * 2
    # The last stage's output is gathered; the last norm's input, the input of a micro-batch that is done and
    # its gradient are kept. Its head's gradient is reduced at each micro-batch.
    hidden = 64 * 8 * 2 / 4
    assert last.activations == first.activations + 64 * 8 * 2 / 2 - hidden + hidden + 2 * hidden
    assert last.gathered == first.gathered + 8 / 2 * (2 + 4) + 8 * 32 / 2 * 4 * (2 / 4)


def test_gradients_are_there_once_they_were_reduced():
    """Without a pipeline after the first micro-batch; whole ones from a stage's first backward pass on."""
    alone = [pipeline_memory(Degrees(shard=2), [64] * n, settings=FULL)[0] for n in (1, 2)]
    assert [one.gradients for one in alone] == [0, alone[0].weights]
    halves = {"settings": FULL, "layers": [2, 2]}
    few, many = (pipeline_memory(Degrees(pipeline=2), [n] * 2, **halves)[0] for n in (64, 64000))
    assert few.gathered - many.gathered == 4 * few.parameters
    assert (few.tokens, many.tokens) == (64, 2 * 64000)


@pytest.mark.parametrize("tp", [1, 2])
def test_checkpointing_keeps_less_of_a_layer(tp):
    kept = [TokenBytes.of(MODEL, Degrees(tensor=tp), each).kept for each in (NONE, SELECTIVE, FULL)]
    assert kept[0] > kept[1] > kept[2] == 8 * 2 / tp  # the hidden state in bfloat16, of this rank's tokens


@pytest.mark.parametrize("settings", [NONE, SELECTIVE, FULL], ids=["none", "selective", "full"])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_activations_grow_with_tokens_and_weights_shrink_with_shards(pipeline, settings):
    def ranks(length, shard):
        return pipeline_memory(Degrees(pipeline=pipeline, shard=shard), [length] * 4, settings=settings)

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

    def live(settings):
        for schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
            job = {"schedule": schedule, "chunks": 2, "settings": settings}
            yield pipeline_memory(Degrees(pipeline=2), [64000] * 4, **job)[1]

    whole, split = live(NONE)
    assert split.tokens == whole.tokens + 64000
    # Beside what four micro-batches in flight keep, gradients of linear layers' outputs wait for W.
    token = TokenBytes.of(MODEL, Degrees(pipeline=2), NONE)
    assert split.activations - whole.activations > 64000 * (token.kept + 2 * token.waiting)
    for recomputing in (SELECTIVE, FULL):
        whole, same = live(recomputing)
        assert same.tokens == whole.tokens


def test_the_longest_micro_batch_that_fits():
    job = memory_job(Degrees())

    def memory(length):
        return job.fitting.peak(Passes.of([length]))[0].total

    def filled(usable, **changes):
        cluster = replace(job.cluster, memory=usable / USABLE + 1, **changes)
        return job.on(cluster).fitting

    assert filled(memory(2 * 1024)).longest == 2 * 1024  # never more
    tight = filled(USABLE * memory(1024))  # not even windows leave enough room
    assert tight.longest == 1024 and not tight.windows_fit
    unknown = filled(USABLE * memory(1024), kind="cpu")
    assert unknown.longest == 2 * 1024 and unknown.windows_fit
    for windows in (1.0, 1.3, 1.77):
        usable = memory(int(windows * 1024))
        longest = filled(usable).longest
        assert longest % 32 == 0 and memory(longest) <= usable < memory(longest + 32)


def test_the_papers_largest_job_fits_its_gpus_and_says_why():
    facts = {"model": PAPER_MODELS["70B"], "schedule": "1F1B"}
    first, *others = pipeline_memory(Degrees(tensor=16, context=4, pipeline=4), [131072] * 4, **facts)
    assert max(rank.total for rank in others) <= first.total < 80e9
    said = first.explain()
    assert f"{first.total / GIB:.2f} GiB" in said and f"{first.tokens:,} tokens in flight" in said
    assert "loss" not in said  # of which this rank has none


def test_slices_have_an_order_of_their_own():
    """On 3 ranks Interleaved1F1B cannot run the 16 slices of the imagined document; PackFlow can."""
    job = memory_job(Degrees(pipeline=3), schedule="Interleaved1F1B", chunks=2, layers=[1] * 6)
    fitting = job.fitting
    assert [rank.tokens for rank in fitting.document(1024)] == [2 * 1024] * 3
    with pytest.raises(PlanError, match="16 micro-batches on 3 ranks"):
        fitting.peak(Passes.of([64] * 16))


def test_stages_have_their_layers_as_torchtitan_divides_them():
    for numbers, layers in {(32, 4): (8, 9, 8, 7), (6, 2): (3, 3), (3, 1): (3,), (86, 2): (43, 43)}.items():
        assert layers_of_stages(*numbers) == layers
    with pytest.raises(PlanError, match=r"2 layers.*8 pipeline stages"):
        layers_of_stages(2, 8)


def test_a_schedule_without_a_known_order_is_refused():
    with pytest.raises(PlanError, match="DualPipeV"):
        pipeline_memory(Degrees(pipeline=2), [8] * 4, schedule="DualPipeV", chunks=2)
