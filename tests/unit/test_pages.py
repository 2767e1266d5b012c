"""The pages of `plan`, `simulate` and `compare`: what they say and draw, whole and without a network."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from commands import CONFIGS, invoke
from dumps import CONFIG, record, write_run

from wlb_titan.commands.page import Timed, gained, lines, pipelines, time_sections, try_next, waits
from wlb_titan.simulator.measured import Pass
from wlb_titan.summary import Estimate

pytestmark = pytest.mark.slow

FILE = CONFIGS / "llama2_550m_64k.toml"
SELECTIVE = ["--activation_checkpoint.class", "SelectiveDocumentAC"]
PIPELINE = ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.context_parallel_degree", "2"]
TIME = "Where a step&#39;s time goes, A step"
PAGES = {  # number of charts, titles of the sections, the answer
    "plan": (
        1,
        "Work of every micro-batch, Try next, All figures",
        r"Under wlb\S* GPUs wait [\d.]+% .* under plain",
    ),
    "simulate": (
        3,
        f"{TIME}, Try next, Policies",
        r"\S+ does [\d.]+x ±[\d.]+ the FLOPs a second of plain/.*; ranks wait \d+% of a step i",
    ),
    "compare": (
        5,
        f"{TIME}, Try next, What differs, Figures, Loss",
        r"b does [\d.]+x the FLOPs .* of a&lt;b; ranks wait 40% of a step instead of 40%",
    ),
}


def test_an_answer_says_whether_it_can_be_told_from_nothing():
    plain = Estimate(2.0, 0.02)
    told = {
        0.02: "b does 1.05x ±0.01 the FLOPs a second of a",
        0.07: "b does 1.05x ±0.04 the FLOPs a second of a: hardly more than the scatter",
        0.12: "b does 1.05x ±0.06 the FLOPs a second of a: no more than the scatter",
    }
    assert {error: gained("b", Estimate(2.1, error).over(plain), "a") for error in told} == told
    assert plain.over(plain).text(".2f", "x") == "1.00x"


def boxes(drawn):
    """Names of a picture's boxes, and float (boxes, 3), their left, top and width."""
    found = re.findall(r'<g><title>(.*?)\n.*?x="(.*?)%" y="(\d+)" width="(.*?)%"', drawn, re.DOTALL)
    return [box[0] for box in found], np.array([box[1:] for box in found], dtype=float)


def test_bars_and_pipelines_have_one_scale_of_seconds_for_the_same_flops():
    """b does 8 FLOPs a second, a 4. Its drawn step has twice the FLOPs of a mean one: 2 s of it count 1."""
    steps = {"a": Timed({"forward": 6.0, "waiting": 4.0}, 4.0, [Pass("F", 0, 0, 2, 8)], 40.0)}
    steps["b"] = Timed({"forward": 9.0, "waiting": 1.0}, 8.0, [Pass("F", 0, 0, 0, 10)], 80.0)
    assert waits(steps, "b", "a") == "; ranks wait 10% of a step instead of 40%."
    assert waits(steps, "c", "a") == ".", "c has no traces"
    bars, drawn = time_sections(steps, "measured", "A step")
    names, places = boxes(bars)
    assert names == ["forward 60", "waiting 40", "forward 90", "waiting 10"]
    np.testing.assert_allclose(places[:, 2], 92 * np.array([0.6, 0.4, 0.45, 0.05]), atol=1e-3)
    assert "a, 10.00 s" in bars and "b, 5.00 s" in bars
    np.testing.assert_allclose(boxes(drawn)[1][:, [0, 2]], [[8 + 18.4, 73.6], [8, 46]], atol=1e-3)
    slow = {
        name: of._replace(passes=[replace(p, start=2 * p.start, seconds=2 * p.seconds) for p in of.passes])
        for name, of in steps.items()
    }  # a round in which the machine had half its speed
    assert boxes(time_sections(slow, "measured", "A step")[1])[1].tolist() == boxes(drawn)[1].tolist()
    assert time_sections({}, "measured", "A step") == ["", ""]
    assert time_sections({"a": steps["a"]._replace(flops=0.0)}, "measured", "A step")[1] == ""


def test_what_to_try_next_runs_where_the_page_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--wlb.cluster", "h200", "--lengths", "/far/lengths.txt"]
    typed = try_next("simulate", [str(tmp_path / "jobs" / "train.toml"), *words])
    assert typed == " ".join(["wlb-titan simulate jobs/train.toml", *words])


def test_a_diverged_run_is_drawn_as_far_as_it_goes():
    page = lines("loss", {"a": ((1, 2, 3), (2.0, 1.0, float("nan"))), "b": ((1,), (float("inf"),))})
    drawn = re.findall(r'class="curve" x1="(.*?)" y1="(.*?)" x2="(.*?)" y2="(.*?)"', page)
    assert drawn == [("0.00%", "0.0", "100.00%", "200.0")]
    assert lines("loss", {"a": ((1,), (float("nan"),))}) == ""


def test_passes_are_drawn_to_scale():
    """Ranks stand by number."""
    passes = [Pass("F", rank, 0, rank, 1, rank=f"pp {rank}") for rank in range(11)]
    drawn = pipelines({"a": [*passes, Pass("B", 11, 3, 11, 1, rank="pp 11")]}, {"a": 12})
    assert re.findall(r">pp (\d+)<", drawn) == [str(rank) for rank in range(12)]
    names, places = boxes(drawn)
    lefts, tops, widths = places.T
    np.testing.assert_allclose(widths, 92 / 12, atol=1e-3)
    np.testing.assert_allclose(lefts, 8 + 92 / 12 * np.arange(12), atol=1e-3)
    assert (np.diff(tops) == np.diff(tops)[0]).all()
    assert names == ["forward 0"] * 11 + ["backward 3"]
    assert "a: 91.7% bubble" in drawn
    assert drawn.count('rect class="apart"') == 12


def test_names_in_a_trace_are_no_html_and_what_an_outline_would_hide_has_none():
    drawn = pipelines(
        {"<i>": [Pass("F", 0, 0, 0, 1, rank="<script>", facts={"<b>": "</title>"})]}, {"<i>": 1}
    )
    Tags(drawn)
    assert ">&lt;script&gt;</text>" in drawn and "&lt;b&gt;: &lt;/title&gt;" in drawn
    drawn = pipelines({"a": [Pass("F", 0, number, number, 1) for number in range(1000)]}, {"a": 1000})
    assert drawn.count("<rect") == 1000 and 'rect class="apart"' not in drawn


class Tags(HTMLParser):
    """Fails at a tag that is not closed, or that asks for another file."""

    def __init__(self, text):
        super().__init__()
        self._open = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        assert not {"src", "href"} & {name for name, _ in attrs} and tag not in ("script", "link", "img")
        if tag not in ("meta", "wbr"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Makes the page of a command."""
    folder = tmp_path_factory.mktemp("pages")
    lengths = folder / "a<b>.txt"
    drawn = np.random.default_rng(0).lognormal(5.5, 1.3, 3000).astype(int).clip(2, 4000)
    np.savetxt(lengths, drawn, fmt="%d")
    common = [FILE, "--lengths", lengths, "--steps", 6, "--training.seq_len", 4096, *PIPELINE]
    commands = {
        "plan": ["plan", *common, "--policies", "plain,wlb,wlb_lazy"],
        "simulate": ["simulate", *common, "--policies", "plain,wlb,wlb_lazy", *SELECTIVE],
        "compare": ["compare", *(_run(folder / name, *facts) for name, facts in RUNS.items())],
    }

    def page(name):
        result = invoke(*commands[name], "--report", folder / name)
        assert result.exit_code == 0 and "Report: " in result.output, result.output
        return (folder / name / "report.html").read_text()

    return page


RUNS = {"a<b": ("plain", 5, (1, 2)), "b": ("wlb", 6, (2, 3))}  # packing, speed, steps that were traced


def _run(folder, policy, tflops, traced):
    parts = {"forward": 0.5, "backward": 0.5, "optimizer": 0.5, "waiting": 1.0}
    figures = {"measured_imbalance": 1.3, "rate": 1e3, "part_seconds": parts}
    records = [record(step, model_tflops=tflops + step % 3, **figures) for step in range(1, 9)]
    return write_run(folder, records, policy, f'{CONFIG}corpus.path = "/data/of/mine/web"\n', traced)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_and_needs_no_network(pages, name, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
    charts, titles, answer = PAGES[name]
    page = pages(name)
    Tags(page)
    assert re.search(f'class="answer">{answer}', page.replace("<wbr>", ""))
    assert re.findall("<h2>(.*?)</h2>", page) == titles.split(", ")
    assert page.count("<figure>") == charts
    assert "a<b" not in page and "/data/of" not in page, "people share these pages"
    if name == "compare":
        assert "b: 50.0% bubble" in page and "optimizer" in page
    else:
        assert str(Path.cwd()) not in page and "a&lt;b&gt;.txt" in page
        assert 'data-label="max delay"' in page or 'data-label="in tokens"' in page
