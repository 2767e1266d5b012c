"""`wlb-titan plan`: contract, table and mistakes. Its page: test_pages.py."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from wlb_titan.commands.command_line import show_table
from wlb_titan.commands.main import main

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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5\n-7\n", "has -7 to 5; it must have a document's length a line"),
        ("5\nseven\n", "cannot be read .*'seven'.*; it must have a document's length a line"),
        ("5\n3.5\n", "cannot be read .*'3.5'"),
        ("9" * 13 + "\n", "has 9+ to 9+; .* from 1 to 2.40"),
        ("9" * 30 + "\n", "cannot be read .* too large"),
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


def test_plans_of_one_policy_are_written(lengths):
    """Other options are refused in tests/drills/test_bad_commands.py."""
    options = ("--compare", "plain,wlb", "--output", "x.jsonl")
    assert_refused(run("--lengths", lengths, *ARGUMENTS, *options), "plans of one policy")


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


def test_tables_stay_whole_where_there_is_no_room(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    rows = [{"policy": "wlb_lazy", "degrees": "TP 8 x CP 2 x PP 4 x DP 16", "setting": "/a[/b] [bold]"}]
    show_table(rows)
    assert "  ".join(rows[0].values()) in capsys.readouterr().out.replace("   ", "  ")
