"""`wlb-titan compare`: what is read from dump folders, said of them and wrong with them."""

import json
import re
from dataclasses import replace
from functools import partial
from html import unescape

import commands
import numpy as np
import pytest
from commands import invoke
from dumps import CONFIG, record, write_run
from hypothesis import given
from hypothesis import strategies as st

from wlb_titan.commands.compare import differences
from wlb_titan.errors import UserError
from wlb_titan.runs import Run, open_run, open_runs, read_trace, write_trace
from wlb_titan.simulator.measured import Pass

output = partial(commands.said, "compare")


@pytest.fixture
def folder(tmp_path):
    """Makes a dump folder."""

    return lambda name, *what, **how: write_run(tmp_path / name, *what, **how)


def make_run(*records):
    return Run("run", None, {}, list(records), (np.empty(0), np.empty(0)))


def rates(*tflops):
    """Records of a run with these rates, after a first one that does not count."""
    return [record(i, seconds=1, model_tflops=rate) for i, rate in enumerate((1, *tflops), start=1)]


def cells(figure, text):
    """Of the row that begins with `figure`, one for each run."""
    line = next(line for line in text.splitlines() if line.strip().startswith(figure))
    return line.replace(figure, "", 1).split()


STEPS = st.tuples(st.integers(1, 10_000), st.floats(0.01, 100), st.booleans())


@given(st.lists(STEPS, min_size=1, max_size=40))
def test_tokens_and_seconds_are_those_of_the_steps_between_the_logged_ones(steps):
    """A record holds means since the line before; summed up again they are what was trained."""
    records, trained, tokens, seconds, since = [], [], 0, 0.0, 0
    for number, (own_tokens, own_seconds, logged) in enumerate(steps, start=1):
        tokens, seconds, since = tokens + own_tokens, seconds + own_seconds, since + 1
        if logged or number == len(steps):
            records.append(record(number, seconds=seconds / since, rate=tokens / seconds, steps=since))
            trained.append((sum(s[0] for s in steps[:number]), seconds))
            tokens, seconds, since = 0, 0.0, 0
    run = make_run(*records)
    assert np.allclose(np.transpose([run.tokens, run.seconds]), trained)


def test_rates_leave_the_first_record_out_and_weigh_by_time():
    second, third = record(2, seconds=1, rate=10), record(3, seconds=3, rate=30)
    run = make_run(record(1, seconds=50, rate=1), second, third)
    assert run.rate("tokens_per_second").value == pytest.approx((10 + 3 * 30) / 4)
    assert make_run(record(1, rate=7)).rate("tokens_per_second") == (7, None), "there is no other"
    assert run.rate("model_tflops") is None, "an older run has no such figure"


def test_a_resumed_run_counts_its_starts_steps_once():
    """Stopped after step 27 and started again: the line of step 30 is about three steps."""
    lines = [record(step, seconds=5, steps=10) for step in (10, 20)]
    lines += [record(30, seconds=23, rate=20, steps=3, start=True), record(40, seconds=5, steps=10)]
    run = make_run(*lines)
    assert run.seconds.sum() == 3 * 50 + 69
    assert run.rate("tokens_per_second").value == 100, "of what was logged first nothing counts"
    assert run.tokens[-1] == 3 * 5000 + 20 * 69


def test_a_run_alone_is_compared_with_nothing(folder, tmp_path):
    parts = {"forward": 1.0, "backward": 2.0, "waiting": 1.0}
    steps = [record(step, rate=8.0, model_tflops=2.0, part_seconds=parts) for step in (1, 2, 3)]
    output(folder("alone", steps, traced=[2]), "--report", tmp_path / "page")
    page = (tmp_path / "page" / "report.html").read_text()
    assert "<title>alone</title>" in page and "runs" not in page.partition("</style>")[2]
    assert "alone has trained on 48 tokens; ranks wait 25% of a step." in page
    titles = ["Where a step&#39;s time goes", "A step", "Try next", "Figures", "Loss"]
    assert re.findall("<h2>(.*?)</h2>", page) == titles


def test_the_error_of_a_rate_is_that_of_its_steps_ratio():
    """Steps of equal length: the standard error of the mean of their rates, without the first record."""
    values = np.array([8.0, 12.0, 10.0, 14.0, 6.0])
    run = make_run(*rates(*values))
    assert run.rate("model_tflops").error == pytest.approx(values.std(ddof=1) / 5**0.5)
    assert make_run(*rates(8, 12)).rate("model_tflops").error is None, "two steps tell nothing of scatter"


def test_a_gain_of_single_runs_has_no_scatter_as_they_differ_by_drift_too(folder):
    runs = {"base": (9, 11, 10, 9, 11), "like": (10, 11, 9, 12, 9), "faster": (14, 15, 16, 15, 15)}
    text = output(*(folder(name, rates(*values)) for name, values in runs.items()))
    same, other = (line for line in text.splitlines() if " a second of base" in line)
    assert same.startswith("like trains on 1.02x the FLOPs and ") and same.endswith("a second of base.")
    assert other.startswith("faster trains on 1.50x the FLOPs")
    assert "differences below some 20 % say nothing. `wlb-titan bench`" in text
    assert text.index("model TFLOP/s") < text.index("tokens a second")


def test_the_scatter_of_a_gain_is_that_between_runs_of_a_kind(folder):
    """Means of 10 and 12, with standard errors of 0.6 and 0.5 between the runs."""
    kinds = {"plain": (8.8, 10, 11.2), "slim": (11, 12, 13)}
    names = []
    for policy, values in kinds.items():
        names += [folder(f"{policy}_{n}", rates(*[rate] * 3), policy) for n, rate in enumerate(values)]
    text = output(*names)
    error = 1.2 * ((1.2 / 3**0.5 / 10) ** 2 + (1 / 3**0.5 / 12) ** 2) ** 0.5
    assert f"slim_0 trains on 1.20x ±{error:.2f} the FLOPs" in text
    assert text.count("trains on") == 1 and "say nothing" not in text


def test_a_rank_that_is_slow_in_most_traced_steps_is_named(folder):
    slow = {"rank 5 on b": 1.2, "rank 2 on a": 1.3}
    steps = [record(1), record(2, slow_ranks=slow), record(3, slow_ranks={"rank 5 on b": 1.25})]
    steps.append(record(4, slow_ranks={}))
    text = output(folder("run", steps))
    assert "run: rank 5 on b was slow in most traced steps." in text and "rank 2" not in text


def test_loss_is_compared_after_equally_many_tokens(folder):
    """The shorter run has 2,000 tokens: of the longer one, records at 1,900 and 2,000 are its last tenth."""
    short = [record(step, loss=8 - step / 10) for step in range(1, 11)]
    long = [record(step, loss=9 - step / 10, seconds=1) for step in range(1, 41)]
    table = output(folder("short", short), folder("long", long))
    assert cells("loss after 2,000 tokens", table) == ["7.0000", f"{(7.1 + 7.0) / 2:.4f}"]


def test_what_differs_comes_first(folder):
    more = CONFIG + "[training]\nsteps = 5\n"
    a = folder("a", [record(1)])
    b = folder("b", [record(1)], policy="wlb_lazy", config=more)
    runs = open_runs([a, b])
    assert differences(runs) == {"wlb.policy": ["plain", "wlb_lazy"], "training.steps": [None, 5]}
    text = output(a, b)
    assert text.index('"wlb_lazy"') < text.index("tokens a second")
    assert "dump_folder" not in text
    assert "The configurations are the same." in output(a, folder("c", [record(1)]))
    masked = folder("d", [record(1)], config=CONFIG + '[wlb.corpus]\nmask = "none"\n')
    assert "wlb.corpus.mask differ: losses say nothing about each other." in output(a, masked)


def test_figures_that_no_run_has_make_no_row(folder):
    a = folder("a", [record(1), record(2)])
    assert "bubble" not in output(a)
    text = output(a, folder("b", [record(1), record(2, bubble=0.25, measured_imbalance=1.5)]))
    assert cells("bubble, measured", text) == ["–", "25.0%"]
    assert cells("imbalance, measured", text) == ["–", "1.500"]


def test_runs_of_one_name_are_told_apart_by_path_and_a_line_that_is_being_written_left_out(folder):
    a, b = folder("x/run", [record(1)]), folder("y/run", [record(1)])
    assert [run.name for run in open_runs([a, b])] == [str(a), str(b)]
    assert [run.name for run in open_runs([a, a])] == ["run"], "once is enough"
    path = folder("a", [record(1), record(2)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [r["step"] for r in open_run(path, "a").records] == [1, 2]


def assert_refused(path, message):
    result = invoke("compare", path)
    assert result.exit_code == 2
    assert str(path) in result.output and message in result.output


NO_LINE = "metrics.jsonl:1: this line is not a valid record of metrics"
WRONG = {  # a file of the folder, what is in it instead (None: it is not there), what is said
    "no metrics": ("metrics.jsonl", None, "there is no metrics.jsonl in it. Name the dump_folder of a run"),
    "no configuration": ("config.toml", None, "there is no config.toml in it"),
    "nothing logged": ("metrics.jsonl", "", "no step has been logged yet"),
    "not JSON": ("metrics.jsonl", "step 1\n", NO_LINE),
    "other JSON": ("metrics.jsonl", "[]\n", NO_LINE),
    "no loss": ("metrics.jsonl", '{"step": 1, "steps": 1}\n', "metrics: KeyError 'seconds'"),
    "twice": ("metrics.jsonl", 2 * f"{json.dumps(record(1))}\n", "metrics: step 1 of 1 steps after step 1"),
    "no time": ("metrics.jsonl", f"{json.dumps(record(1, seconds=0))}\n", "in 0 seconds"),
    "not TOML": ("config.toml", "x", "config.toml:1: this is not valid TOML"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_folder_is_said_with_its_name(folder, case):
    path, (name, text, message) = folder("a", [record(1)]), WRONG[case]
    if text is None:
        (path / name).unlink()
    else:
        (path / name).write_text(text)
    assert_refused(path, message)


def test_a_folder_of_runs_names_them(folder, tmp_path):
    folder("a", [record(1)])
    assert_refused(tmp_path, "These folders in it are runs: a.")
    assert_refused(tmp_path / "nowhere", "there is no config.toml in it")


def test_a_trace_reads_back(tmp_path):
    first = Pass("F", 0, 3, 0.0, 0.5, "dp 0", "pp 0", facts={"tokens": 7})
    passes = [first, Pass("FB", 1, 12, 0.75, 1.0, "dp 1", "pp 1")]
    path = tmp_path / "t.json"
    write_trace(passes, path)
    assert read_trace(path) == passes
    events = json.loads(path.read_text())["traceEvents"]
    drawn = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert drawn == [("F3", 0, 5e5), ("FB12", 7.5e5, 1e6)]
    for wrong, said in (
        ([], "no passes that took time"),
        ([replace(first, seconds=0.0), passes[1]], "no passes that took time"),
        ([replace(first, kind="X")], "'X3' is not a pass"),
        ([replace(first, start=-0.5)], "some of its passes have no times"),
    ):
        write_trace(wrong, path)
        with pytest.raises(UserError, match=f"{re.escape(str(path))}: this is not a trace .*{said}"):
            read_trace(path)
    path.write_text("{}")
    with pytest.raises(UserError, match=re.escape(str(path))):
        read_trace(path)


def test_a_bench_leads_the_page_with_its_figures(tmp_path, folder):
    figures = dict.fromkeys(("tokens_per_second", "imbalance", "bubble", "peak_gib"), 1.5)
    plain = {"policy": "plain", "over_first": 1, "scatter": 0.0, "predicted": 1.0, "step": 3}
    slim = {"policy": "slim", "over_first": 1.3, "scatter": 0.04, "predicted": 1.22, "step": 4}
    slim["parts"] = {"forward": 3.0, "waiting": 1.0}
    records = [
        {"flops_per_second": 1e12, **figures, "parts": {"forward": 1.0, "waiting": 1.0}, **turn}
        for turn in (plain, slim)
    ]
    (folder("bench", [record(1)], traced=[3, 4]) / "traces").rename(tmp_path / "bench" / "turns")
    file, page = tmp_path / "bench" / "bench.json", tmp_path / "page" / "report.html"
    file.write_text(json.dumps({"policies": records}))
    words = (tmp_path / "bench", folder("run", [record(1), record(2)]), "--report", page.parent)
    _, said = (output(*words) for _ in range(2))  # a page of ours is replaced
    answer = "slim trains 1.30x ±0.04 as fast as plain on this machine (predicted 1.22x)"
    assert f"{answer}." in said and "1.300x" not in said, "its table is on the page"
    shown = unescape(page.read_text())
    assert f'class="answer">{answer}; ranks wait 25% of a step instead of 50%.' in shown
    assert "<title>plain and slim in turns</title>" in shown and "1.300x ±0.040" in shown
    assert "plain, 2.00 s" in shown and f"slim, {2 / 1.3:.2f} s" in shown and "slim: 50.0% bubble" in shown
    assert "--wlb.policy slim" in shown and "What differs" not in shown
    assert "1.300x ±0.040" in output(tmp_path / "bench")
    for damage in ([], [{"policy": "plain"}], 5, [records[0] | {"parts": {}}]):
        file.write_text(json.dumps({"policies": damage}))
        assert_refused(tmp_path / "bench", "bench.json is not what a bench writes: ")


def test_the_last_validation_stands_beside_the_loss(folder, tmp_path):
    runs = [folder(name, [record(step) for step in (1, 2, 3)]) for name in ("plain", "slim")]
    (runs[1] / "validation.jsonl").write_text('{"step": 1, "loss": 4.5}\n{"step": 3, "loss": 4.25}\n{"st')
    said = output(*runs, "--report", tmp_path / "page")
    assert cells("loss of the last validation", said) == ["–", "4.2500"]
    assert "Validation" in (tmp_path / "page" / "report.html").read_text()
    (runs[1] / "validation.jsonl").write_text('{"step": 1, "loss": "high"}\n')
    with pytest.raises(UserError, match=r"validation\.jsonl is not a valid record of validations"):
        open_run(runs[1], "slim")
