"""What layers recompute changes no weight by a bit, whatever their kinds and however these are mixed."""

import pytest
from lab import Cases, ranks, rows, tight

COMMON = ("--debug.seed", "7", "--training.seq_len", "512", "--training.global_batch_size", "4")
SLICES = ("--wlb.packing.tokens_in_flight", "4096", "--wlb.packing.cost_model", "quadratic:1,2200")
"""What the plan would else have from the kind."""

LAYOUTS = ("pp2 layers8 Interleaved1F1B", "cp2 layers4 per_document groups2", "pp2 layers4 slim8")
LAYOUTS += ("dp2 ep2 qwen3_moe",)
LONG = (
    *("layers4 compiled", "pp2 layers4 ZBVZeroBubble", "tp2 layers4", "tp2 layers4 compiled"),
    *("dp2 layers4 slim6 merged", "dp1 qwen3_moe compiled", "cp2 deepseek_v3", "dp1 gpt_oss"),
    *("dp1 lora", "dp1 float8", "dp1 float8 compiled", "tp2 float8"),
)


@pytest.mark.parametrize("layout", rows(LAYOUTS + LONG, LONG))
def test_weights_are_the_same(lab, fork_server, tmp_path, layout):
    results = Cases(fork_server, tmp_path, lab.corpus)
    common = [*COMMON, *(SLICES if "slim" in layout else ())]
    device = tight(results.words("", f"{layout} mixed", common), ranks(layout), tmp_path)
    words = {"stored": common, "mixed": [*common, *device], "keys": common}
    results.add("weights", {f"{layout} {kind}": {"steps": 2, "words": words[kind]} for kind in words})
    expected = results[f"{layout} stored"]["after"]
    assert len(results[f"{layout} mixed"]["kinds"]) > 1, "the device is to ask for a mix"
    for kind in ("mixed", "keys"):
        weights = results[f"{layout} {kind}"]["after"]
        assert [name for name in expected if weights[name] != expected[name]] == [], kind
