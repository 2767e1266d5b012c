"""The scripts of benchmarks/ that are about attention: cases and counts, the replay of a launch, and that
attention.py runs from end to end on the CPU, with the reference."""

import json
import subprocess
import sys
from importlib import import_module
from itertools import groupby, product

import numpy as np
import pytest
from commands import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import SHARD, packed, visible
from wlb_titan.kernels import gluon_launch
from wlb_titan.kernels.segments import Shape, check_segments
from wlb_titan.kernels.tiles import KeyTiles, key_tiles

from wlb_titan.commands.profile import time_attention


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """A script of benchmarks/ by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield import_module


@pytest.fixture(scope="module")
def benchmark(scripts):
    return scripts("attention")


@pytest.fixture(scope="module")
def replay(scripts):
    return scripts("attention_replay")


def test_cases_are_valid():
    import attention_cases

    found = attention_cases.cases()
    assert {case.group for case in found} == set("abcde")
    for case in found:
        q_start, q_len, _, kv_len = case.segments.T
        q_tokens = int((q_start + q_len).max())
        check_segments(case.segments.numpy(), q_tokens, max(sum(case.documents), int(kv_len.max())))
        assert int(q_len.sum()) == q_tokens, "no padding"


@pytest.mark.parametrize("heads", [(32, 4), (32, 32), (16, 8), (12, 12)], ids=str)
def test_divisions_that_are_timed_can_run_and_differ_in_speed_only(heads):
    import attention_divisions

    group = heads[0] // heads[1]
    found = list(attention_divisions.others(group, heads[1]))
    assert len(found) == len(set(found)) > 1
    for one in found:
        assert isinstance(one, gluon_launch.Division)
        assert group % (one.split * one.pack) == 0 and 1 <= one.section <= heads[1]


def test_shards_add_up_and_flops_count_the_real_mask():
    from attention_cases import flops, pairs, shard, whole

    documents = [3000, 7, 640, 1]
    shards = [shard(documents, 4, rank) for rank in range(4)]
    assert sum(pairs(s) for s in shards) == pairs(whole(documents))
    assert sum(int(s[:, 1].sum()) for s in shards) == sum(documents)
    assert pairs(SHARD) == int(visible(SHARD, 13, 12).sum())
    assert flops(SHARD, Shape(4, 2, 16, 8)) == 2 * pairs(SHARD) * 4 * (16 + 8)


def test_time_attention():
    forward, backward = time_attention(packed([20, 30]), Shape(2, 1, 16, 16), device="cpu", milliseconds=1)
    assert forward > 0 and backward > 0


@pytest.fixture
def rehearse(benchmark, tmp_path, monkeypatch, capsys):
    """Runs the program on the CPU with interpreted kernels, one tiny case; its rows and what it printed."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(benchmark, "TINY", {"shapes": [[2, 1, 16, 16]], "groups": "d", "scale": 256})

    def run(*arguments: str) -> tuple[list[dict], str]:
        benchmark.main(["--device", "cpu", "--output", str(tmp_path), *arguments])
        lines = (tmp_path / "attention.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], capsys.readouterr().out

    return run


@pytest.mark.long
def test_a_run_loses_nothing_and_resumes(rehearse, benchmark, tmp_path):
    """Killed, tried again, and complete; then a further call has nothing to do."""
    rows, text = rehearse("--stages", "turns", "--limit", "0.3")
    assert len(rows) == 2 and all(row["error"].startswith("killed after") for row in rows)
    assert "BAD turns    triton                [2, 1, 16, 16] : killed after" in text
    rows, text = rehearse("--stages", "warm", "turns", "time", "--retry", "--limit", "600")
    of_triton = [row for row in rows if row["implementation"] != "gluon"]  # which a CPU does not run
    assert not [row for row in of_triton if "error" in row]
    ended = [row["kind"] for row in of_triton if "seconds" in row]
    assert ended == ["ceiling", "warm", "turns", "time"]
    (timed,) = [row for row in of_triton if row["kind"] == "time" and "case" in row]
    assert timed["forward_tflops"] > 0 and timed["backward_ms"] > 0
    (turns,) = [row["times"]["triton"] for row in rows if "times" in row]
    assert len(turns) == 2 and min(turns[0] + turns[1]) > 0 and "Noise: equal work timed twice" in text
    assert "128 documents of 512; heads 2:1" in text
    again, _ = rehearse("--stages", "warm", "turns", "time")
    assert again == rows
    with (tmp_path / "attention.jsonl").open("a") as file:
        file.write('{"kind": "time", "implem')  # stopped while it wrote
    for _ in range(2):
        results = benchmark.Results(tmp_path / "attention.jsonl")
        assert results.rows == rows
        results.add(rows[0], {"case": "the next"})
        rows = results.rows


def test_jobs(benchmark):
    jobs = list(benchmark.jobs(["warm", "turns", "time", "grid"], "cuda"))
    kinds = [kind for kind, _ in groupby(job["kind"] for job in jobs)]
    assert kinds == ["ceiling", "warm", "turns", "time", *["grid", "packs"] * 4]
    names = [json.dumps(job) for job in jobs]
    assert len(set(names)) == len(names)


@pytest.mark.long
def test_the_grid_and_the_packs_are_measured(rehearse):
    rows, _ = rehearse("--stages", "grid", "--limit", "600")
    assert not [row for row in rows if "error" in row]
    assert [row["kind"] for row in rows if "seconds" in row] == ["ceiling", "grid", "packs"]
    assert all(row["forward_ms"] > 0 for row in rows if "cut" in row)
    assert sum("forward_ms" in row for row in rows if row["kind"] == "packs") == 4


def lists_of(lengths: list[int]) -> KeyTiles:
    begin = np.cumsum(lengths) - lengths
    segments = np.stack([begin, lengths, begin, lengths], axis=1).astype(np.int32)
    return key_tiles(segments, sum(lengths), tokens=64, block_n=128, turn_rows=64)


def event_by_event(kernel, lists: KeyTiles, heads: int, order: list[tuple[int, int]], each: int, units: int):
    """Microseconds of a launch, of which every program asks the counters themselves for its turn."""
    values = np.tile(lists.first_turns // 2, (heads, 1))
    visible = np.zeros(values.shape)
    free, running, ends = [0.0] * units, {}, []

    def steps_of(tile: int, program: int):
        for row in lists.items[lists.tiles[tile, 2] : lists.tiles[tile, 3]].tolist():
            blocks = range((row[3] + 63) // 64 - 1, row[0] // 64 - 1, -1)
            mine = range(program * each, (program + 1) * each)
            walk = product(blocks, mine) if kernel.blocks_first else ((b, h) for h in mine for b in blocks)
            for block, head in walk:
                yield (head, row[4] + block, row[5]) if row[5] >= 0 else None

    def next_adds(state):
        """(When it is added, which) of each warp's next dQ; never, if it is not its turn yet."""
        for i in sorted(state["next"]):
            if i < len(state["steps"]) and i - 1 in state["done"]:
                buffer, adder = state["warps"][i % kernel.buffers]
                done = state["done"][i] = max(state["done"][i - 1] + kernel.step, buffer)
                if (wanted := state["steps"][i]) is None:
                    yield max(done, adder), i
                elif values[wanted[:2]] == wanted[2]:
                    asked = adder if kernel.ask_early else max(done, adder)
                    yield max(done, max(asked, visible[wanted[:2]]) + kernel.poll), i
        if min(state["next"]) >= len(state["steps"]):
            yield max(state["done"][len(state["steps"]) - 1], *(adder for _, adder in state["warps"])), None

    def soonest(state):
        return min(next_adds(state), default=(np.inf, None), key=lambda entry: entry[0])

    todo = list(order)
    while todo or running:
        if todo and free:
            start = min(free)
            if all(soonest(state)[0] >= start for state in running.values()):
                free.remove(start)
                tile, program = todo.pop(0)
                at = start + kernel.tile
                added = {"next": list(range(kernel.buffers)), "warps": [(at, at)] * kernel.buffers}
                running[tile, program] = {"steps": list(steps_of(tile, program)), "done": {-1: at}, **added}
                continue
        key, state = min(running.items(), key=lambda entry: soonest(entry[1])[0])
        at, i = soonest(state)
        assert np.isfinite(at), "every program waits for another"
        if i is None:
            free.append(at)
            ends.append(at)
            del running[key]
            continue
        wanted, warp = state["steps"][i], i % kernel.buffers
        state["next"][warp] += kernel.buffers
        state["warps"][warp] = at + kernel.free, at + (kernel.free if wanted is None else kernel.visible)
        if wanted is not None:
            values[wanted[:2]] += 1
            visible[wanted[:2]] = at + kernel.visible
    return max(ends)


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=6),
    buffers=st.integers(1, 3),
    step=st.sampled_from([1.0, 2.5]),
    units=st.integers(1, 5),
    **dict.fromkeys(("blocks_first", "ask_early", "items_up", "heaviest_first"), st.booleans()),
)
@settings(max_examples=40, deadline=None)
def test_backward_is_what_happens_event_by_event(replay, lengths, items_up, heaviest_first, units, **knobs):
    kernel = replay.Backward(**knobs)
    lists = replay.in_order(lists_of(lengths), items_up=items_up, heaviest_first=heaviest_first)
    launched = [x.tolist() for x in replay.tile_and_head(len(lists.tiles), 2, 1)]
    happened = event_by_event(kernel, lists, 4, list(zip(*launched, strict=True)), 2, units)
    assert kernel.replay(lists, 4, 2, 1, units) == pytest.approx(happened)


def test_forward_by_hand(replay):
    """One head of a document of 256: tiles of one and two blocks, one of which is masked in each."""
    kernel = replay.Forward(block=2.0, masked=1.0, tile=4.0, heads_at_a_time=1, dynamic=False)
    segments = np.array([[0, 256, 0, 256]], dtype=np.int32)
    assert kernel.milliseconds(segments, 1, 1, units=2) == pytest.approx(9e-3)
    assert kernel.milliseconds(segments, 1, 1, units=1) == pytest.approx(16e-3)
    work = np.array([9.0, 8, 7, 6, 5, 4, 3])
    assert replay.to_and_fro(work, 3).tolist() == [9 + 4 + 3, 8 + 5, 7 + 6]
    assert replay.free_first(work, 3).tolist() == [0, 1, 2, 2, 1, 0, 0]


def test_orders_of_the_list(replay):
    """Five short documents that share tiles, and a long one."""
    lists = lists_of([129] * 5 + [2000])
    assert (np.diff(lists.tiles[:, 0]) != 128).sum() == 1, "chains, which are in the order of their keys"
    other = replay.in_order(lists, items_up=True, heaviest_first=True)
    assert sorted(other.tiles.tolist()) == sorted(lists.tiles.tolist())
    assert sorted(other.items.tolist()) == sorted(lists.items.tolist())
    for begin, end in other.tiles[:, 2:]:
        assert (np.diff(other.items[begin:end, 0]) > 0).all()
    work = [sum(row[3] - row[0] for row in other.items[begin:end]) for begin, end in other.tiles[:, 2:]]
    assert work[:15] == sorted(work, reverse=True)[:15], "the long one's; its last tile is the lightest"


PROGRAM = """
import json, pathlib, sys, time
name, file, *_ = sys.argv[1:]
with open(file, "a") as results:
    results.write(json.dumps({"part": name, "case": "measured"}) + "\\n")
while name == "slow" and not pathlib.Path("goes_on").exists():
    time.sleep(1)
"""


def test_a_part_that_was_cut_goes_on_and_no_other_is_run_again(scripts, tmp_path, monkeypatch):
    by_value, file = scripts("by_value"), tmp_path / "device" / "by_value.jsonl"
    (tmp_path / "by_value_parts.py").write_text(PROGRAM)
    places = {"ROOT": tmp_path, "LOG": tmp_path / "outputs" / "log", "__file__": str(tmp_path / "it.py")}
    for name, place in places.items():
        monkeypatch.setattr(by_value, name, place)
    parts = by_value.Part("slow", 3), by_value.Part("quick", 60)
    assert not by_value.run(parts, file, "cuda")
    (tmp_path / "goes_on").touch()
    with file.open("a") as results:
        results.write('{"part": "sl')  # as where the machine was taken away
    assert by_value.run(parts, file, "cuda")
    ended = [(row["part"], row["ended"]) for row in by_value.rows_of(file) if "ended" in row]
    assert ended == [("slow", "killed"), ("quick", 0), ("slow", 0)]


def test_cases_with_a_row_are_not_measured_again(tmp_path):
    file, cases = tmp_path / "by_value.jsonl", []
    for _ in range(2):
        command = [sys.executable, str(ROOT / "benchmarks" / "by_value_parts.py"), "float8", str(file), "cpu"]
        subprocess.run(command, check=True, capture_output=True)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        cases.append([row["case"] for row in rows if "case" in row])
        file.write_text("".join(json.dumps(row) + "\n" for row in rows if row.get("case") != cases[0][4]))
    assert len(set(cases[0])) == 12 and cases[1] == [*cases[0][:4], *cases[0][5:], cases[0][4]]


def test_a_python_without_torch_is_told_what_it_lacks():
    """-S: without the packages that are installed, as a bare machine's."""
    command = [sys.executable, "-S", str(ROOT / "benchmarks" / "by_value.py")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "lacks torch and triton and numpy; give" in result.stderr
