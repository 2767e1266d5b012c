"""`wlb-titan plan`: contract, table, report and mistakes."""

import io
import json
import re
from pathlib import Path

import numpy as np
import planning
import pytest
from click.testing import CliRunner
from rich.console import Console

from wlb_titan.commands.command_line import show_table
from wlb_titan.commands.main import main
from wlb_titan.commands.plan import sharding_rows
from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.degrees import Degrees
from wlb_titan.job import Job
from wlb_titan.plan import LENGTH, MicroBatch

pytestmark = pytest.mark.slow

FILE = Path(__file__).parents[2] / "train_configs" / "llama2_7b_128k.toml"
SHORT = ["--training.seq_len", "256", "--training.local_batch_size", "4"]
SHORT += ["--parallelism.context_parallel_degree", "1", "--parallelism.pipeline_parallel_degree", "1"]
ARGUMENTS = [*SHORT, "--wlb.packing.cost_model", "quadratic:2,100"]


@pytest.fixture
def lengths(tmp_path):
    values = (np.random.default_rng(0).pareto(1.0, 3000) * 12 + 2).clip(2, 400).astype(int)
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, values)) + "\n")
    return path


def run(*arguments):
    """Of Table 1's 7B-128K job, unless a file is named first."""
    file = [] if str(arguments[0]).endswith(".toml") else [FILE]
    return CliRunner().invoke(main, ["plan", *map(str, [*file, *arguments])])


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("policy", ["plain", "fixed_greedy", "wlb", "wlb_lazy"])
def test_plan_file(lengths, tmp_path, policy):
    output = tmp_path / "plan.jsonl"
    result = run(
        "--lengths", lengths, "--wlb.packing.policy", policy, *ARGUMENTS, "--steps", 30, "--output", output,
        "--training.local_batch_size", 2, "--parallelism.data_parallel_shard_degree", 2,
        "--parallelism.context_parallel_degree", 2, "--wlb.sharding.policy", "per_document",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    document_lengths = [int(line) for line in lengths.read_text().split()]
    plans = written(output)
    assert [plan["iteration"] for plan in plans] == list(range(30))
    for plan in plans:
        assert set(plan) == {"iteration", "plan_ms", "imbalance", "micro_batches"}
        places = [(m["dp_rank"], m["index"]) for m in plan["micro_batches"]]
        assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
        works = [m["workload"] for m in plan["micro_batches"]]
        assert plan["imbalance"] == pytest.approx(max(works) / np.mean(works))
        for m in plan["micro_batches"]:
            tokens = [d["length"] for d in m["documents"]]
            assert m["length"] == sum(tokens) + m["padding"]
            assert m["workload"] == pytest.approx(sum(2 * d * d + 100 * d for d in tokens))
            assert all(d["start"] + d["length"] <= document_lengths[d["id"] % 3000] for d in m["documents"])
            assert m["sharding"] == "per_document"
            held = np.zeros(len(tokens), dtype=int)
            for rank in m["ranks"]:
                assert sum(count for _, _, count in rank) <= m["length"] // 2
                for document, _, count in rank:
                    held[document] += count
            assert held.tolist() == tokens


def test_without_context_parallelism_there_is_no_sharding(lengths, tmp_path):
    output = tmp_path / "plan.jsonl"
    assert run("--lengths", lengths, *ARGUMENTS, "--steps", 1, "--output", output).exit_code == 0
    (plan,) = written(output)
    keys = {"dp_rank", "index", "length", "padding", "workload", "documents"}
    assert set(plan["micro_batches"][0]) == keys


def test_a_file_of_lengths_is_the_stream_itself_unless_a_seed_is_given(lengths, tmp_path):
    def ids(*seed):
        output = tmp_path / "plan.jsonl"
        assert run("--lengths", lengths, *ARGUMENTS, "--steps", 2, "--output", output, *seed).exit_code == 0
        return [
            (d["start"] + d["length"], d["id"])
            for plan in written(output)
            for m in plan["micro_batches"]
            for d in m["documents"]
        ]

    document_lengths = [int(line) for line in lengths.read_text().split()]
    ends = dict((id_, end) for end, id_ in ids())
    assert all(ends[id_] == document_lengths[id_] for id_ in list(ends)[:-1])
    assert ids("--wlb.corpus.seed", 1) != ids() == ids()


def test_compare_prints_a_row_for_each_policy(lengths):
    result = run("--lengths", lengths, *ARGUMENTS, "--compare", "plain,wlb,wlb_lazy", "--steps", 40)
    assert result.exit_code == 0, result.output
    assert "3,000 documents" in result.stdout
    assert "longer than the window and cut" in result.stdout
    rows = {
        name: re.search(rf"^\s*{name}\s+(.*)$", result.stdout, re.M) for name in ("plain", "wlb", "wlb_lazy")
    }
    imbalance = {name: float(row.group(1).split()[0]) for name, row in rows.items()}
    assert imbalance["plain"] > 1.1 > imbalance["wlb_lazy"] >= 1
    assert imbalance["plain"] > imbalance["wlb"]


def test_the_paper_drops_and_counts(lengths):
    result = run("--lengths", lengths, *ARGUMENTS, "--wlb.packing.tail", "drop", "--steps", 10)
    assert re.search(r"plain: [\d,]+ tokens were left out", result.stdout)


def test_the_solver_says_how_good_it_is(lengths):
    solver = ("--wlb.packing.policy", "fixed_solver", "--wlb.packing.time_limit", 2)
    result = run("--lengths", lengths, *ARGUMENTS, *solver, "--steps", 2)
    assert result.exit_code == 0, result.output
    assert "the solver's packings are" in result.stdout


@pytest.mark.parametrize("context_parallel", [1, 2])
def test_report_is_one_page(lengths, tmp_path, context_parallel, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--lengths", lengths, *ARGUMENTS, "--wlb.packing.policy", "wlb_lazy", "--steps", 30]
    result = run(
        *arguments, "--parallelism.context_parallel_degree", context_parallel, "--report", tmp_path / "r"
    )
    assert result.exit_code == 0, result.output
    page = (tmp_path / "r" / "report.html").read_text()
    assert page.count('<div class="chart">') == 5, "work of both policies, imbalance, delay"
    assert ("<h2>Context parallelism</h2>" in page) == (context_parallel == 2)
    assert "<h1>How lengths.txt packs</h1>" in page and str(tmp_path) not in page, "people share these pages"
    assert re.search(r'class="answer">Under wlb_lazy GPUs wait [\d.]+% of the time .* under plain', page)
    assert f"<pre>wlb-titan simulate {FILE} ".replace(":", ":<wbr>") in page
    assert "<pre>wlb-titan simulate " in page and " --lengths lengths.txt" in page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5\n\n7\n", "line 2: '' is no document's length"),
        ("+5\n-7\n", r"line 1: '\+5' is no"),
        ("1e3\n", "line 1: '1e3' is no"),
        ("0\n" * 100, "line 1: '0' is no"),
        ("5\nseven\n", "line 2: 'seven' is no document's length"),
        ("5\n3.5\n", "line 2: '3.5' is no"),
        ("9" * 30 + "\n", "line 1: '9+' is no .* from 1 to 2.40"),
        ("", "is empty"),
        ("1\n" * 9, "All documents have one token"),
        ("5\n6\n", "2 documents, fewer than the 4 micro-batches"),
    ],
)
def test_bad_files_of_lengths(tmp_path, text, message):
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    assert_refused(run("--lengths", path, *ARGUMENTS), message)


def assert_refused(result, message):
    assert result.exit_code == 2
    error = result.stderr.removeprefix("Error: ").strip()
    assert re.search(message, error), error
    assert "\n" not in error
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--wlb.packing.policy", "wlb", "--wlb.packing.thresholds", "[100, 300]"],
            "300 is above the context window of 256",
        ),
        (["--compare", "plain,wlb", "--output", "x.jsonl"], "plans of one policy"),
    ],
)
def test_options_that_do_not_go_together(lengths, options, message):
    """Others are refused in tests/drills/test_bad_commands.py."""
    assert_refused(run("--lengths", lengths, *ARGUMENTS, *options), message)


@pytest.mark.parametrize("name", ["web", "code", "paper", "wlbllm", "prolong"])
def test_named_lengths(name):
    result = run("--lengths", name, *ARGUMENTS, "--steps", 2)
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"{name} (") and "262,144 documents" in result.output


def test_what_planning_finds_wrong_is_said_with_its_place(lengths, tmp_path):
    (tmp_path / "train.toml").write_text(
        'base = "llama3_debug"\n[training]\nseq_len = 256\nlocal_batch_size = 4\n'
        '[wlb.corpus]\npath = "corpus"\n[wlb.packing]\npolicy = "wlb"\nthresholds = [300]\n'
    )
    few = ("--lengths", lengths, "--steps", 1)
    assert_refused(run(tmp_path / "train.toml", *few), r"train\.toml:9: wlb\.packing\.thresholds = \[300\]: ")
    assert_refused(
        run(tmp_path / "train.toml", *few, "--wlb.packing.thresholds", "[400]"),
        r"command line: wlb\.packing\.thresholds = \[400\]: ",
    )
    few = (*few, "--wlb.packing.thresholds", "[200]")
    assert_refused(
        run(tmp_path / "train.toml", *few, "--training.global_batch_size", 10**6),
        "--lengths: The corpus has 3000 documents",
    )


def test_few_steps_carry_their_standard_error(lengths):
    options = ("--lengths", lengths, *SHORT)
    assert "±" in run(*options, "--steps", 5).stdout
    assert "±" not in run(*options, "--steps", 1).stdout


def test_tables_stay_whole_where_there_is_no_room():
    rows = [{"policy": "wlb_lazy", "degrees": "TP 8 x CP 2 x PP 4 x DP 16", "setting": "/a[/b] [bold]"}]
    for terminal, width in ((False, 20), (True, 20), (True, 200)):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=width, no_color=True)
        show_table(rows, console)
        shown = console.file.getvalue()
        assert all(text in shown for text in (*rows[0], *rows[0].values())), shown


def test_sharding_policies_are_compared_on_the_same_micro_batches():
    """One long document, and more and more short ones beside it."""
    job = Job(window=4096, micro_batches=6, degrees=Degrees(context=4), attention=planning.UNMERGED)
    micro_batches, tokens = [], []
    for index in range(6):
        lengths = [4096] + [128] * (32 * index)
        documents = np.zeros((len(lengths), 4), dtype=np.int64)
        documents[:, LENGTH] = lengths
        tokens.append(sum(lengths))
        micro_batches.append(MicroBatch(documents, length=tokens[-1], index=index))
    rows = {row["sharding"]: row for row in sharding_rows(micro_batches, job)}
    assert list(rows) == list(STRATEGIES.candidates)

    def figure(policy, heading):
        return float(rows[policy][heading].rstrip("x msGB"))

    assert (
        rows["per_sequence"]["speedup"] == "1.000x" and rows["per_sequence"]["chosen"] == "per_sequence 100%"
    )
    assert figure("hybrid", "speedup") > figure("adaptive", "speedup")
    assert figure("adaptive", "speedup") >= max(1, figure("per_document", "speedup"))
    # Keys and values of all documents, or of the long one: 3/4 of them, 3 passes, 2 x 32 heads of 128.
    layers = max(job.layers) * job.replica_micro_batches
    received = [2 * 32 * 128 * 2 * 3 * 3 / 4 * layers * number / 1e9 for number in (np.mean(tokens), 4096)]
    assert figure("per_document", "received") == pytest.approx(received[0], abs=0.01)
    assert figure("hybrid", "received") <= received[1]
    # A document alone is balanced by both; with many short ones per_sequence is not.
    assert figure("per_sequence", "max") > 1.2 > 1.15 > figure("per_document", "max")
    (alone,) = (row for row in sharding_rows(micro_batches[:1], job) if row["sharding"] == "per_sequence")
    assert float(alone["max"]) == pytest.approx(1.0, abs=0.02)
