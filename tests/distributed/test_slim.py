"""Slices of documents under every parallelism give the losses and gradients of one process without any."""

import json
from collections import Counter

import pytest
from lab import Cases, assert_met, going_on, layout, make_corpus, rows

from wlb_titan.simulator.measured import BESIDE

COMMON = ("--loss.num_chunks", "2", "--wlb.packing.cost_model", "quadratic:1,1000")
TWO_STEPS = ("pp4 layers4 slim11 slack", "pp2 dp2 layers4 slim6 Interleaved1F1B asymmetric full")
CASES = (*TWO_STEPS, "pp2 cp2 layers4 slim8 Interleaved1F1B adaptive selective")
CASES += ("cp4 slim7 hybrid groups2 full", "pp2 tp2 slim8 asymmetric full")
LONG_CASES = (
    # First: in one process, groups of all earlier cases take their time while it compiles.
    *("pp2 dp2 slim6 compiled", "pp2 dp2 layers4 slim7 selective", "pp2 tp2 slim8 full"),
    *("pp2 dp2 layers4 slim6 Interleaved1F1B full", "pp2 cp2 slim8 ulysses", "cp2 tp2 slim6 per_document"),
    *("pp4 layers4 slim9 asymmetric full", "pp2 cp2 slim8 adaptive asymmetric full", "dp4 slim4 milp"),
)
# The longest document is beyond a data-parallel rank's share of the work. Of three ranks the last, of six the
# last two have nobody to share with, but make the others' groups with them.
MERGED = ("pp2 dp2 layers4 slim6 merged selective", "dp2 layers1 slim6 merged compiled", "dp3 slim6 merged")
MERGED += ("dp2 replicas2 slim6 merged",)
LONG_MERGED = (
    *("pp2 dp2 layers4 slim6 merged Interleaved1F1B full", "dp4 slim6 merged", "dp2 tp2 slim6 merged"),
    *("dp2 cp2 slim6 merged hybrid selective", "dp3 slim6 merged milp", "dp6 layers1 slim6 merged"),
)
LONG = LONG_CASES + LONG_MERGED


@pytest.fixture(scope="module")
def results(lab, tmp_path_factory, fork_server):
    folder = tmp_path_factory.mktemp("slim")
    outliers = folder / "outliers"
    make_corpus(folder / "outliers.jsonl", outliers, lengths=([125] + [8] * 40) * 10)
    results = Cases(fork_server, folder, lab.corpus)
    cases = {name: {"steps": [1, 2] if name in TWO_STEPS else [1]} for name in CASES + LONG_CASES}
    for name in MERGED + LONG_MERGED:
        linear = 100 if "replicas" in name else 10
        words = ["--wlb.corpus.path", str(outliers), "--wlb.packing.cost_model", f"quadratic:1,{linear}"]
        cases[name] = {"words": words}
    results.add("plan", cases, COMMON, LONG)
    return results


@pytest.mark.parametrize("name", rows(CASES + MERGED + LONG, LONG))
def test_losses_and_gradients_equal_one_process(results, name):
    for record in results[name]:
        assert record["loss"] == pytest.approx(record["reference"], rel=1e-5)
        assert record["error"] < 1e-5, record["worst"]
        assert record["longest_pack"] < 0.9 * record["longest_document"], "no document was sliced"
    assert_met(results[name][-1]["met"])


@pytest.mark.parametrize("name", rows(MERGED + LONG_MERGED, LONG))
def test_documents_were_shared(results, name):
    groups = {tuple(ranks) for ranks in results[name][0]["merged"]}
    assert groups == {(0, 1, 2, 3) if name.startswith(("dp4", "dp6")) else (0, 1)}


def test_a_run_goes_on_where_its_checkpoint_was_and_its_trace_has_every_pass(lab):
    slim = (
        *(*layout("pp2 slim9 1F1B"), "--checkpoint.interval", "2"),
        *("--training.local_batch_size", "1"),  # a window on two stages
        *("--training.steps", "4", "--wlb.trace_every", "4"),
    )
    whole = lab.experiment("slim_whole", *slim)
    lab.run(2, [whole])
    again = lab.experiment("slim_again", *slim, *going_on(whole, 2))
    lab.run(2, [again])
    assert [record["step"] for record in again.metrics()] == [3, 4]
    assert again.losses() == whole.losses()[2:]
    trace = json.loads((again.folder / "traces" / "step-4.json").read_text())["traceEvents"]
    passes = Counter(event["name"] for event in trace if event["ph"] == "X")
    beside = dict.fromkeys(BESIDE, 2)
    assert passes == {f"{kind}{n}": 1 if kind == "L" else 2 for kind in "FLB" for n in range(9)} | beside
    assert 0 < again.metrics()[1]["bubble"] < 1


@pytest.mark.parametrize("name", ["dp2 slim6", "replicas2 slim6"])
def test_a_validation_between_steps_changes_none(lab, name):
    """After one, ranks whose backward passes are of other slices still reduce the same gradients together."""
    words = (*layout(name), "--training.steps", "3", "--wlb.validation.hold_out", "0.1")
    runs = [lab.experiment(f"{name} every {n}", *words, "--wlb.validation.every", n) for n in ("0", "1")]
    lab.run(2, runs)
    assert runs[1].losses() == pytest.approx(runs[0].losses(), rel=1e-6) and len(runs[1].validation()) == 3
