"""A job that is killed and started again sees the token stream, and the losses, of one that was not.

It trains one epoch of conversations with label masks, of which some are held out.
"""

import pytest
from lab import going_on, layout
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

LAYER = {
    "attention.wo": [128, 128],
    "attention_norm": [128],
    "feed_forward.w1": [384, 128],
    "feed_forward.w2": [128, 384],
    "feed_forward.w3": [384, 128],
    "ffn_norm": [128],
}
SPLIT = {"wq": [128, 128], "wk": [64, 128], "wv": [64, 128]}
JOINT = {"wqkv": [256, 128]}
SETTINGS = (
    "amsgrad betas capturable decoupled_weight_decay differentiable eps foreach fused initial_lr lr maximize "
    "weight_decay"
)
OVERRIDES = (
    *("--wlb.epochs", "1", "--wlb.validation.hold_out", "0.1"),
    *("--checkpoint.interval", "2"),
    *("--parallelism.pipeline_parallel_degree", "2"),
)


@pytest.fixture(scope="module")
def corpus(lab, conversations):
    return lab.reading(conversations["few"])


@pytest.fixture(scope="module")
def uninterrupted(lab, corpus):
    experiment = lab.experiment("uninterrupted", *OVERRIDES, *corpus)
    lab.run(2, [experiment])
    return experiment


def test_killed_and_started_again(lab, corpus, uninterrupted):
    """SIGKILL to all ranks as soon as step 3 is reported."""
    experiment = lab.experiment("killed", *OVERRIDES, *corpus)
    reported = lab.start_and_kill(2, experiment, 3)
    lab.run(2, [experiment])
    assert reported < len(uninterrupted.metrics())
    steps = [[record["step"] for record in run.metrics()] for run in (experiment, uninterrupted)]
    assert steps[0] == steps[1] and experiment.losses() == uninterrupted.losses()


def test_started_again_on_another_degree(lab, corpus, uninterrupted):
    """From the checkpoint of step 4 with PP 2 to DP 2: the plan's state belongs to no rank."""
    words = (*corpus, *OVERRIDES, *layout("dp2"), *going_on(uninterrupted, 4))
    experiment = lab.experiment("other_degree", *words)
    lab.run(2, [experiment])
    assert experiment.losses() == pytest.approx(uninterrupted.losses()[4:], rel=1e-4)
    validated = [run.validation() for run in (experiment, uninterrupted)]
    assert validated[0][-1]["loss"] == pytest.approx(validated[1][-1]["loss"], rel=1e-4)


@pytest.mark.parametrize("batch", [1, 8])
def test_an_epoch_goes_on_with_another_batch(lab, corpus, uninterrupted, batch):
    """It ends with the first step after which all was trained on, counted from the checkpoint's documents."""
    words = (*corpus, *OVERRIDES, *layout("dp2"), *going_on(uninterrupted, 4), "--training.local_batch_size")
    experiment = lab.experiment(f"batch_{batch}", *words, str(batch))
    lab.run(2, [experiment])
    tokens, whole = ([record["tokens"] for record in run.metrics()] for run in (experiment, uninterrupted))
    assert sum(whole[:4] + tokens) > sum(whole[:-1]) and sum(whole[:4] + tokens[:-1]) < sum(whole)
    assert experiment.metrics()[0]["step"] == 5


def test_half_of_the_ranks_go_on_with_what_is_left(lab, corpus):
    """With thresholds and L_max that come out by themselves."""
    wlb = (*corpus, *OVERRIDES, "--wlb.policy", "wlb")
    whole = lab.experiment("on_two", *wlb, *layout("dp2"))
    lab.run(2, [whole])
    half = lab.experiment("on_one", *wlb, *layout(), *going_on(whole, 4))
    lab.run(1, [half])
    left = whole.metrics()[4:]
    assert left[0]["waiting_documents"] > 0 and len(half.metrics()) == len(left) > 1
    for name in ("step", "tokens", "keys_per_token", "waiting_documents", "waiting_tokens"):
        assert [record[name] for record in half.metrics()] == [record[name] for record in left]
    assert half.losses() == pytest.approx(whole.losses()[4:], rel=1e-4)


def weights(qkv):
    """The shapes of all weights by name; `qkv`: those of the first projection."""
    layer = LAYER | {f"attention.qkv_linear.{name}": shape for name, shape in qkv.items()}
    shapes = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"tok_embeddings": [512, 128], "norm": [128], "lm_head": [512, 128]}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def test_a_checkpoint_has_the_entries_that_it_always_had(uninterrupted):
    """So that a job goes on from a checkpoint of an earlier version: entries are found by name and shape."""
    expected = {name: f"{shape} torch.float32" for name, shape in weights(SPLIT).items()}
    for name, shape in weights(JOINT).items():
        state = {"exp_avg": shape, "exp_avg_sq": shape, "step": []}
        expected |= {f"optimizer.state.{name}.{key}": f"{own} torch.float32" for key, own in state.items()}
        expected |= {f"optimizer.param_groups.{name}.{key}": "bytes" for key in SETTINGS.split()}
    others = ("dataloader.planner", "lr_scheduler.last_epoch", "train_state.ntokens_seen", "train_state.step")
    folder = uninterrupted.folder / "checkpoint" / "step-4"
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {name: description(entry) for name, entry in entries.items()}
    assert found == expected | dict.fromkeys(others, "bytes")


def description(entry) -> str:
    if isinstance(entry, TensorStorageMetadata):
        return f"{list(entry.size)} {entry.properties.dtype}"
    return "bytes"
