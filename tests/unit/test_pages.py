"""The pages of `plan`, `simulate` and `compare` in a browser, where one is installed (Debian: chromium)."""

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from click.testing import CliRunner

from wlb_titan.commands.main import main
from wlb_titan.commands.page import command, cost, gained, lines, pipeline_charts, search_command
from wlb_titan.simulator.trace import Span, write_trace
from wlb_titan.summary import Estimate

pytestmark = pytest.mark.slow

WIDTHS = (1280, 390)  # of a desk and of a phone
PIPELINE = ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.context_parallel_degree", "2"]


def test_an_answer_says_whether_it_can_be_told_from_nothing():
    plain = Estimate(2.0, 0.02)
    assert gained("b", Estimate(2.1, 0.02).over(plain), "a") == "b does 1.05x ±0.01 the FLOPs a second of a"
    assert gained("b", Estimate(2.1, 0.12).over(plain), "a").endswith(
        "1.05x ±0.06 the FLOPs a second of a: no more than the scatter"
    )
    assert gained("b", Estimate(2.1, 0.07).over(plain), "a").endswith(": hardly more than the scatter")
    assert plain.over(plain).text(".2f", "x") == "1.00x"
    assert cost(0.43, 1.2) == "the largest remaining cost is the pipeline bubble (43%)."
    assert cost(0.02, 1.2) == "the largest remaining cost is the imbalance (1.20)."
    assert cost(None, 1.01) == "balancing has little left to gain."


def test_what_to_try_next_runs_where_the_page_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    typed = [str(tmp_path / "jobs" / "train.toml"), "--wlb.cluster", "h200", "--lengths", "/far/lengths.txt"]
    assert command("simulate", typed) == (
        "wlb-titan simulate jobs/train.toml --wlb.cluster h200 --lengths /far/lengths.txt"
    )
    degrees = ["--parallelism.tensor_parallel_degree", "2", "--parallelism.context_parallel_degree=4"]
    searched = search_command(["a.toml", *degrees, "--training.steps", "5"], 64)
    assert searched == "wlb-titan simulate a.toml --training.steps 5 --search --gpus 64"


def test_a_diverged_run_is_drawn_as_far_as_it_goes():
    page = lines("loss", "step", {"a": ((1, 2, 3), (2.0, float("nan"), float("inf")))})
    spec = json.loads(
        html.unescape(re.search(r"<script[^>]*>(.*?)</script>", page)[1]), parse_constant=pytest.fail
    )
    assert [row["value"] for row in spec["layer"][0]["data"]["values"]] == [2.0, None, None]


def test_rows_of_a_pipeline_stand_by_number():
    spans = [Span("dp 0", f"pp {rank}", "F0", rank, 1) for rank in range(12)]
    drawn = pipeline_charts({"a": spans})
    assert re.findall(r'"rank":"pp (\d+)"', drawn) == [str(rank) for rank in range(12)]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Makes the page of a command, once."""
    folder, made = tmp_path_factory.mktemp("pages"), {}
    lengths = folder / "a<b>.txt"
    drawn = np.random.default_rng(0).lognormal(5.5, 1.3, 3000).astype(int).clip(2, 4000)
    lengths.write_text("".join(f"{length}\n" for length in drawn))
    file = Path(__file__).parents[2] / "train_configs" / "llama2_550m_64k.toml"
    common = [file, "--lengths", lengths, "--steps", 6, "--training.seq_len", 4096, *PIPELINE]
    runs = [_run(folder / name, *more) for name, more in RUNS.items()]
    commands = {
        "plan": ["plan", *common, "--compare", "plain,wlb,wlb_lazy"],
        "simulate": ["simulate", *common, "--policies", "plain,wlb,wlb_lazy"],
        "compare": ["compare", *runs],
    }

    def page(command):
        if command not in made:
            words = map(str, [*commands[command], "--report", folder / command])
            result = CliRunner().invoke(main, list(words))
            assert result.exit_code == 0, result.output
            made[command] = folder / command / "report.html"
        return made[command]

    return page


RUNS = {"a<b": (1.3, 5.0), "a_run_with_a_name_that_is_long": (1.1, 6.0)}


def _run(folder, imbalance, tflops):
    (folder / "traces").mkdir(parents=True)
    (folder / "config.toml").write_text('base = "llama3_debug"\n[wlb.corpus]\npath = "/data/of/mine/web"\n')
    figures = {"imbalance": imbalance, "measured_imbalance": imbalance, "bubble": 0.3, "loss": 2.0}
    figures |= {"seconds": 2.0, "tokens_per_second": 1e3, "delay_mean": 0.5, "waiting_tokens": 5}
    records = [
        {"step": step, "steps": 1, "model_tflops": tflops + step % 3, **figures} for step in range(1, 9)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    starts = {"F0": (0, 1), "B0": (3, 2)}
    spans = [Span("dp 0", f"pp {rank}", name, starts[name][rank], 1) for name in starts for rank in (0, 1)]
    write_trace(spans, folder / "traces" / "step-2.json")
    return folder


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", ["plan", "simulate", "compare"])
def test_a_page_fits_draws_all_and_complains_of_nothing(browser, pages, command, width, dark):
    browser.open(pages(command), width, dark=dark)
    assert browser.complaints == []
    assert browser.value("document.documentElement.scrollWidth") <= width, "it scrolls to the side"
    beyond = "filter(e => e.getBoundingClientRect().right > innerWidth).map(e => e.outerHTML).join()"
    assert browser.value(f"[...document.querySelectorAll('section *')].{beyond}")[:999] == ""
    assert browser.value("document.querySelectorAll('.chart').length") >= 6
    look = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert (max(browser.value(look)) < 60) == dark
    ink = browser.value(
        "getComputedStyle(document.querySelector('.chart text')).fill.match(/\\d+/g).map(Number)"
    )
    assert (min(ink) > 120) == dark, "letters of charts follow the page"
    assert browser.value("document.querySelector('.answer').textContent").endswith(".")


def test_what_is_under_the_pointer_has_its_values(browser, pages):
    browser.open(pages("compare"), 1280)
    chart = "[...document.querySelectorAll('figure')].find(e => e.textContent.includes('bubble'))"
    box = f"{chart}.querySelector('.mark-rect path')"
    browser.value(f"{box}.scrollIntoView()")
    at = browser.value(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({box}.getBoundingClientRect())")
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
    shown = "document.querySelector('#vg-tooltip-element.visible')?.textContent"
    assert browser.until(shown), "nothing shows"
    assert "forward" in browser.value(shown) and "ms" in browser.value(shown)
