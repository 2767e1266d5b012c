"""Document attention inside torchtitan's models computes what their own attention does there."""

import bases
import pytest
import torch
from lab import Lab, layout
from pipeline_reference import without_meshes

from wlb_titan.runtime.attention.module import DocumentMask
from wlb_titan.runtime.models.bases import base_config

LENGTHS = (40, 7, 81)


@pytest.mark.parametrize("name", ["gpt_oss", "muse_glimmer", "deepseek_v3"])
def test_the_output_is_that_of_torchtitan_s_attention(name):
    """FlexAttention, which has no gradients on CPUs, on documents longer and shorter than the windows."""
    theirs = getattr(bases, name)().model_spec.model
    ours = base_config(f"bases:{name}").model_spec.model
    torch.manual_seed(0)
    models = [config.build() for config in (theirs, ours)]
    for model in models:
        model.init_states()
        if name == "gpt_oss":  # whose experts compute in bfloat16, so that the model has no other type
            for layer in model.layers.values():
                layer.moe = torch.nn.Identity()
    models[1].load_state_dict(models[0].state_dict())
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
    tokens = torch.randint(theirs.vocab_size, positions.shape)
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    rows = [[end - length, length] * 2 for length, end in zip(LENGTHS, ends, strict=True)]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), without_meshes():
        mask = DocumentMask(torch.tensor(rows, dtype=torch.int32))
        masks = (models[0].get_attention_masks(positions), mask)
        want, got = (
            model(tokens, positions=positions, attention_masks=mask)
            for model, mask in zip(models, masks, strict=True)
        )
    assert (got - want).norm() <= 1e-5 * want.norm()


def test_a_router_that_prefers_experts_is_seen(fork_server, tmp_path):
    """Two of four experts get all tokens, and both are one rank's."""
    lab = Lab(tmp_path, fork_server, base="trainers:lopsided")
    run = lab.experiment("lopsided", *layout("dp2 ep2"), "--training.steps", "1")
    lab.run(2, [run])
    (record,) = run.metrics()
    assert record["busiest_expert"] == record["busiest_expert_rank"] == 2
    assert "over 1.5 times their share" in run.log.read_text()
