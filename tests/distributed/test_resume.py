"""A job that is killed and started again sees the token stream, and the losses, of one that was not: in one
epoch of conversations with label masks, of which some are held out."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lab import going_on, layout
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

LAYER = {"attention.wo": [128, 128], "attention_norm": [128], "ffn_norm": [128]}
LAYER |= {f"feed_forward.w{n}": shape for n, shape in ((1, [384, 128]), (2, [128, 384]), (3, [384, 128]))}
SPLIT = {"wq": [128, 128], "wk": [64, 128], "wv": [64, 128]}
JOINT = {"wqkv": [256, 128]}
SETTINGS = (
    "amsgrad betas capturable decoupled_weight_decay differentiable eps foreach fused initial_lr lr maximize "
    "weight_decay"
)
OVERRIDES = ("--wlb.epochs", "1", "--wlb.validation.hold_out", "0.1", "--checkpoint.interval", "2")
OVERRIDES += ("--parallelism.pipeline_parallel_degree", "2")
SCHEDULE = ("--lr_scheduler.warmup_steps", "8", "--lr_scheduler.total_steps", "40")


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


@pytest.mark.parametrize("batch", [1, pytest.param(8, marks=pytest.mark.long)])
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
    found = dict.fromkeys(entries, "bytes")
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            found[name] = f"{list(entry.size)} {entry.properties.dtype}"
    assert found == expected | dict.fromkeys(others, "bytes")


@pytest.mark.parametrize(
    "words",
    [
        ("--optimizer.param_groups.0.optimizer_kwargs", "{lr = 0.006, weight_decay = 0.5}"),
        pytest.param(SCHEDULE, marks=pytest.mark.long),
    ],
    ids=["settings", "schedule"],
)
def test_rate_and_decay_are_those_of_the_file_also_of_a_run_that_goes_on(lab, corpus, uninterrupted, words):
    """Each step from the checkpoint on is AdamW's at the new rate, times the schedule at that step."""
    settings = ("--checkpoint.interval", "1", *words, *layout("pp2"), *going_on(uninterrupted, 4))
    experiment = lab.experiment(f"other {words[0]}", *corpus, *OVERRIDES, *settings)
    lab.run(2, [experiment])
    records, before = experiment.metrics(), tensors(uninterrupted, 4)
    of_schedule = "warmup" in words[0]
    steps, rate, decay = len(uninterrupted.metrics()), *((0.003, 0.1) if of_schedule else (0.006, 0.5))
    for step in (5, 6):
        expected = rate * (step / 8 if of_schedule else 1 - (step - 1) / steps)
        assert records[step - 5]["lr/AdamW"] == pytest.approx(expected)
        after = tensors(experiment, step)
        for name in (name for name in after if f"optimizer.state.{name}.exp_avg" in after):
            mean, square = (after[f"optimizer.state.{name}.{key}"] for key in ("exp_avg", "exp_avg_sq"))
            update = mean / (1 - 0.9**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
            weight = before[name] * (1 - expected * decay) - expected * update
            moved = after[name] - before[name]
            torch.testing.assert_close(moved, weight - before[name], rtol=1e-3, atol=1e-6)
        before = after


def tensors(run, step) -> dict[str, torch.Tensor]:
    """Those of a checkpoint, whole."""
    folder = run.folder / "checkpoint" / f"step-{step}"
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    entries = [(name, entry) for name, entry in entries if isinstance(entry, TensorStorageMetadata)]
    found = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


@pytest.mark.long
def test_experts_go_on_as_if_nothing_was(lab):
    """With the biases of their routers and the optimizer's moments: exactly on the same degrees, compiled."""
    words = ("--base", "bases:qwen3_moe", "--training.steps", "3", "--checkpoint.interval", "2")
    words += ("--training.seq_len", "128", "--debug.seed", "0")  # no router is near a tie
    whole = lab.experiment("experts", *words, *layout("dp2"), "--checkpoint.initial_load_path", "none")
    lab.run(2, [whole])
    runs = {}
    for name in ("dp2 compiled", "dp2 ep2", "tp2", "pp2"):
        runs[name] = lab.experiment(f"experts {name}", *words, *layout(name), *going_on(whole, 2))
    lab.run(2, list(runs.values()))
    expected = tensors(whole, 3)
    assert any(tensor.any() for name, tensor in expected.items() if "expert_bias" in name)
    for name, run in runs.items():
        exact = name == "dp2 compiled"
        assert run.losses() == pytest.approx(whole.losses()[2:], rel=0 if exact else 1e-5), name
        found = tensors(run, 3)
        assert found.keys() == expected.keys(), name
        for key, tensor in expected.items():
            same = exact or "expert_bias" in key  # experts compute in bfloat16
            error = (found[key] - tensor).abs().max()
            assert error <= (0 if same else 1e-2) * tensor.abs().max(), f"{name}: {key}: {error}"


@pytest.mark.long
def test_a_seed_checkpoint_of_a_run_of_epochs(lab, corpus, uninterrupted):
    """Training begins at its weights, which stay without a rate, and goes through all documents."""
    words = ("--wlb.epochs", "1", "--wlb.validation.hold_out", "0.1", *corpus, *layout())
    words += ("--optimizer.param_groups.0.optimizer_kwargs.lr", "0.0", "--checkpoint.create_seed_checkpoint")
    run = lab.experiment("seed", *words, "true")
    run.folder = lab.folder / "seed_of_epochs"
    lab.run(1, [run])
    run.overrides = [*run.overrides[:-1], "false"]
    lab.run(1, [run])
    tokens = [[record["tokens"] for record in each.metrics()] for each in (run, uninterrupted)]
    assert tokens[0] == tokens[1]
    before, after = (tensors(run, step) for step in (0, len(tokens[0])))
    assert all(torch.equal(after[name], before[name]) for name in before if "optimizer." not in name)
