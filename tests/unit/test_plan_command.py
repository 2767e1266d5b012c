"""`wlb-titan plan`: contract and table. Its page: test_pages.py; mistakes: drills/test_bad_commands.py."""

import json
import re

import numpy as np
import pytest
from commands import CONFIGS, invoke
from corpora import write_prepared

from wlb_titan.commands.command_line import show_table
from wlb_titan.commands.plan import _shares
from wlb_titan.plan import MicroBatch, Plan
from wlb_titan.summary import Summary

pytestmark = pytest.mark.slow

FILE = CONFIGS / "llama2_7b_128k.toml"
DEGREES = "--parallelism.context_parallel_degree 1 --parallelism.pipeline_parallel_degree 1"
SHORT = f"--training.seq_len 256 --training.local_batch_size 4 {DEGREES}".split()
ARGUMENTS = [*SHORT, "--wlb.packing.cost_model", "quadratic:2,100"]


@pytest.fixture
def lengths(tmp_path):
    values = (np.random.default_rng(0).pareto(1.0, 3000) * 12 + 2).clip(2, 400).astype(int)
    path = tmp_path / "lengths.txt"
    np.savetxt(path, values, fmt="%d")
    return path


def run(lengths, *arguments):
    """What it prints of Table 1's 7B-128K job."""
    result = invoke("plan", FILE, "--lengths", lengths, *arguments)
    assert result.exit_code == 0 and not result.stderr, result.output
    return result.stdout


@pytest.fixture
def plans_of(lengths, tmp_path):
    """The plans of so many steps, as they are written."""

    def plans_of(steps, *words):
        output = tmp_path / "plan.jsonl"
        run(lengths, *ARGUMENTS, "--steps", steps, "--output", output, *words)
        return [json.loads(line) for line in output.read_text().splitlines()]

    return plans_of


def test_a_plan_names_the_rows_of_a_shuffled_corpus(tmp_path):
    corpus, output = tmp_path / "corpus", tmp_path / "plan.jsonl"
    write_prepared(corpus, [[1] * length for length in range(2, 202)])
    words = [FILE, "--wlb.corpus.path", corpus, *ARGUMENTS, "--steps", 3, "--output", output]
    assert invoke("plan", *words).exit_code == 0
    ends, lengths = {}, {}
    for plan in map(json.loads, output.read_text().splitlines()):
        for piece in (document for m in plan["micro_batches"] for document in m["documents"]):
            assert piece["start"] == ends.get(piece["id"], 0)
            ends[piece["id"]] = piece["start"] + piece["length"]
            lengths[piece["id"]] = piece["row"] + 2
    last = max(ends)  # of which more is to come
    assert ends[last] <= lengths.pop(last) and len(lengths) > 20
    assert {id_: ends[id_] for id_ in lengths} == lengths


@pytest.mark.parametrize("policy", ["plain", "fixed_greedy", "wlb", "wlb_lazy"])
def test_a_plan_says_where_every_token_of_its_documents_goes(lengths, plans_of, policy):
    degrees = "--parallelism.data_parallel_shard_degree 2 --parallelism.context_parallel_degree 2"
    words = f"--training.local_batch_size 2 {degrees} --wlb.policy {policy}/per_document"
    plans = plans_of(30, *words.split())
    document_lengths = [int(line) for line in lengths.read_text().split()]
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
            assert all(d["start"] + d["length"] <= document_lengths[d["row"]] for d in m["documents"])
            assert m["sharding"] == "per_document"
            held = np.zeros(len(tokens), dtype=int)
            for rank in m["ranks"]:
                assert sum(count for _, _, count in rank) <= m["length"] // 2
                for document, _, count in rank:
                    held[document] += count
            assert held.tolist() == tokens


def test_without_context_parallelism_there_is_no_sharding(plans_of):
    (plan,) = plans_of(1)
    keys = {"dp_rank", "index", "length", "padding", "workload", "documents", "recomputed"}
    assert set(plan["micro_batches"][0]) == keys


def test_a_file_of_lengths_is_the_stream_itself_unless_a_seed_is_given(lengths, plans_of):
    def ends(*seed):
        batches = [m for plan in plans_of(2, *seed) for m in plan["micro_batches"]]
        return [(d["id"], d["start"] + d["length"]) for m in batches for d in m["documents"]]

    document_lengths = [int(line) for line in lengths.read_text().split()]
    assert all(end == document_lengths[id_] for id_, end in list(dict(ends()).items())[:-1])
    assert ends("--wlb.corpus.seed", 1) != ends() == ends()


def test_a_comparison_has_a_row_for_each_policy(lengths, on_terminal):
    words = (*ARGUMENTS, "--policies", "plain,wlb,wlb_lazy", "--steps", 40)
    said, shown = on_terminal("plan", FILE, "--lengths", lengths, *words)
    assert said == run(lengths, *words) and "Planning wlb_lazy/per_sequence" in shown
    assert "3,000 documents" in said and "longer than the window and cut" in said
    found = re.findall(r"^\s*(plain|wlb\w*)/per_sequence\s+([\d.]+)", said, re.M)
    imbalance = {name: float(number) for name, number in found}
    assert imbalance["plain"] > 1.1 > imbalance["wlb_lazy"] >= 1
    assert imbalance["plain"] > imbalance["wlb"]


def test_steps_may_have_different_numbers_of_micro_batches():
    """As under `slim` where a step needs more packs to fit, or has too few documents."""
    steps, document = ([3.0, 1.0], [2.0, 2.0, 2.0, 2.0]), np.array([[0, 0, 4, 0, 0]])
    packs = [tuple(MicroBatch(document, length=4, workload=work) for work in works) for works in steps]
    summary = Summary.of([Plan(number, step, 0.0) for number, step in enumerate(packs)], 8)
    works = _shares({"slim": summary})["slim"][1]
    assert (works[0], works[50], works[-1]) == (1.5, 1.0, 0.5) and (np.diff(works) <= 0).all()


def test_how_good_a_solver_is_and_few_steps_are_told(lengths):
    solver = ("--wlb.policy", "fixed_solver", "--wlb.packing.time_limit", 2, "--steps", 2)
    assert "the solver's packings are" in run(lengths, *ARGUMENTS, *solver)
    assert "±" in run(lengths, *SHORT, "--steps", 5), "the standard error"
    assert "±" not in run(lengths, *SHORT, "--steps", 1)


@pytest.mark.parametrize("name", ["web", "code", "paper", "wlbllm", "prolong"])
def test_lengths_may_be_a_name(name):
    said = run(name, *ARGUMENTS, "--steps", 2)
    assert said.startswith(f"{name} (") and "262,144 documents" in said


def test_tables_stay_whole_where_there_is_no_room(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    rows = [{"policy": "wlb_lazy", "degrees": "TP 8 x CP 2 x PP 4 x DP 16", "setting": "/a[/b] [bold]"}]
    show_table(rows)
    assert "  ".join(rows[0].values()) in capsys.readouterr().out.replace("   ", "  ")
