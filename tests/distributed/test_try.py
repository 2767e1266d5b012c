import pytest
from lab import Cases, assert_met

MODELS = ("qwen3", "qwen3_moe", "gpt_oss", "muse_glimmer", "deepseek_v3")


@pytest.fixture(scope="module")
def results(lab, tmp_path_factory, fork_server):
    results = Cases(fork_server, tmp_path_factory.mktemp("models"), lab.corpus)
    cases = {}
    for m in MODELS:
        name = f"cp2 {'ep2 ' if m in ('qwen3_moe', 'gpt_oss') else ''}wlb hybrid {m}"
        cases[name] = {}
    results.run("plan", cases, ("--wlb.packing.cost_model", "quadratic:1,1000"))
    return results


@pytest.mark.parametrize("m", MODELS)
def test_it(results, m):
    name = f"cp2 {'ep2 ' if m in ('qwen3_moe', 'gpt_oss') else ''}wlb hybrid {m}"
    for r in results[name]:
        print(name, r)
        assert r["loss"] == pytest.approx(r["reference"], rel=1e-4)
        assert r["error"] < 1e-4, (r["error"], r["worst"])
    assert_met(results[name][-1]["met"])
