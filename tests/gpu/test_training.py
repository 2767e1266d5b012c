"""Training by the kernels, step by step, beside training by the reference attention from the same weights."""

from functools import cache

import pytest

# What a base adds to the kernels' cases: groups, windows, sinks, latent attention, experts; and slices.
BASES = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "muse_glimmer", "deepseek_v3")
SMALL = ("llama", "gpt_oss")  # of these in small
# The blocks of gpt-oss as torchtitan checkpoints the real model's, also where a small one stands in for it.
COMPILED = {"llama": (), "gpt_oss": ("--activation_checkpoint.class", "FullAC"), "deepseek_v3": ()}
PACKING = {
    "wlb_lazy": ("--wlb.policy", "wlb_lazy", "--wlb.packing.cost_model", "quadratic:1,1000"),
    "slim": ("--wlb.policy", "slim", "--wlb.packing.micropacks", "8"),
}
LOSS, GRADIENTS = 5e-3, 5e-2  # relative differences; products in another order round to other numbers


@pytest.fixture(scope="module")
def trained(lab, target):
    """Metrics of a base's first steps under overrides."""

    @cache
    def run(base, *words):
        name = "_".join([base, *words[1::2]]).replace(":", "_").replace(",", "_")
        experiment = lab.experiment(
            name,
            *("--base", target.base(base), "--training.steps", "3", "--debug.seed", "0"),
            *("--training.seq_len", target.pick(cuda="4096", cpu="256"), "--training.global_batch_size", "4"),
            *("--checkpoint.enable", "false", "--checkpoint.initial_load_path", "none"),
            *("--metrics.log_freq", "1", "--optimizer.param_groups.0.optimizer_kwargs.lr", "1e-4", *words),
        )
        lab.run(1, [experiment])
        return experiment.metrics()

    return run


def check_the_same(some, others):
    for key, tolerance in (("loss", LOSS), ("grad_norm", GRADIENTS)):
        assert [r[key] for r in some] == pytest.approx([r[key] for r in others], rel=tolerance), key
    assert len(some) == 3


def marked(base, *others):
    return pytest.param(base, *others, marks=() if base in SMALL else pytest.mark.gpu)


@pytest.mark.parametrize(
    ("base", "packing"), [*(marked(base, "wlb_lazy") for base in BASES), ("llama", "slim")]
)
def test_it_trains_as_by_the_reference(trained, base, packing):
    words = (*PACKING[packing], "--wlb.attention.implementation")
    check_the_same(trained(base, *words, "auto"), trained(base, *words, "reference"))


@pytest.mark.parametrize("base", map(marked, COMPILED))
def test_it_trains_as_compiled(trained, base):
    words = (*PACKING["wlb_lazy"], "--wlb.attention.implementation", "auto", *COMPILED[base])
    check_the_same(trained(base, *words, "--compile.enable", "true"), trained(base, *words))


def test_it_learns(trained):
    first, *_, last = trained("llama", *PACKING["wlb_lazy"], "--wlb.attention.implementation", "auto")
    assert last["loss"] < first["loss"]
