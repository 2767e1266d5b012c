"""Products in float8, emulated: losses near those of the same model without, on all degrees."""

import pytest
from lab import CONFIG, going_on, layout, rows
from test_hf_weights import SAVED_IN_HF, loading

from wlb_titan.config.documents import open_corpus, training_documents
from wlb_titan.errors import UserError
from wlb_titan.runtime.models.load import load_config

STEPS = ("--training.steps", "3", "--optimizer.param_groups.0.optimizer_kwargs.lr", "0.0002")
LAYOUTS = ("tp2", "cp2", "dp2", "pp2", "pp2 slim4", "cp2 wlb_lazy hybrid")
LONG = LAYOUTS[2:]


@pytest.mark.parametrize("name", rows(LAYOUTS, LONG))
def test_losses_are_near_those_of_the_model_without(lab, name):
    """By weights that both load."""
    runs = [lab.experiment(text, *layout(text), *STEPS) for text in (f"{name} float8", name)]
    lab.run(2, runs)
    found, expected = (run.losses() for run in runs)
    assert found == pytest.approx(expected, rel=1e-3) and len(found) == 3
    assert found != pytest.approx(expected, rel=1e-6), "nothing is in float8"


def test_a_run_resumes_and_its_weights_leave_and_come_back(lab):
    words = (*layout("float8"), *STEPS)
    whole = lab.experiment("whole", *words, "--checkpoint.interval", "2")
    saved = lab.experiment("saved", *words, *SAVED_IN_HF)
    lab.run(1, [whole, saved])
    resumed = lab.experiment("resumed", *words, *going_on(whole, 2))
    loaded = lab.experiment("loaded", *words, *loading(saved.folder / "checkpoint" / "step-3"))
    plain = lab.experiment("plain", *layout(), *STEPS, *loading(saved.folder / "checkpoint" / "step-3"))
    lab.run(1, [resumed, loaded, plain])
    assert resumed.losses() == whole.losses()[2:] and saved.losses() == whole.losses()
    assert loaded.losses()[0] < saved.losses()[0] - 0.05, "the weights are not those that were trained"
    assert loaded.losses() == pytest.approx(plain.losses(), rel=1e-3)


HEAD = ["--base", "bases:float8_head"]
BLOCKS = {  # with the head in float8, of each of the 8 chunks of the loss
    "cp2 float8 slim4 hybrid": (16, []),
    "tp2 float8 slim4 merged dp2": (16, []),
    "cp2 slim4 hybrid": (8 * 16, HEAD),
    "dp1 wlb_lazy": (8 * 16, HEAD),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_tokens_of_products_are_whole_blocks(lab, name):
    block, words = BLOCKS[name]
    loaded = load_config(CONFIG, ["--wlb.corpus.path", str(lab.corpus), *layout(name), *words])
    job, wlb = loaded.job, loaded.config.wlb
    for plan in job.plans(training_documents(wlb, open_corpus(wlb.corpus)), 3):
        for m in plan.packs:
            assert m.length % (block * job.degrees.context) == 0
            assert (m.padding > 0) == (m.length * m.sharers > int(m.lengths.sum()))


def test_what_float8_cannot_do_is_refused():
    """By one sentence, before anything starts."""
    with pytest.raises(UserError, match=r"264 tokens are not a multiple of 16, as .* in float8 require"):
        load_config(CONFIG, [*layout("float8"), "--training.seq_len", "264"])
    words = "layers.0.attention.qkv_linear.wqkv and 9 more multiply in float8, which needs a GPU of compute"
    with pytest.raises(UserError, match=words):
        load_config(CONFIG, ["--base", "bases:float8_kernels", "--wlb.device", "cpu"])
