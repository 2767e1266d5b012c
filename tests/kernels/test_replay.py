"""The replay of a launch: against a simulation event by event, against cases worked out by hand, and that its
orders of the list are those that it names.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wlb_titan.kernels.tiles import KeyTiles, key_tiles

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def replay():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import attention_replay

        yield attention_replay


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
            walk = (
                [(b, h) for b in blocks for h in mine]
                if kernel.blocks_first
                else [(b, h) for h in mine for b in blocks]
            )
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
                running[tile, program] = {
                    "steps": list(steps_of(tile, program)),
                    "done": {-1: at},
                    "next": list(range(kernel.buffers)),
                    "warps": [(at, at)] * kernel.buffers,
                }
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
    blocks_first=st.booleans(),
    ask_early=st.booleans(),
    items_up=st.booleans(),
    heaviest_first=st.booleans(),
    units=st.integers(1, 5),
)
@settings(max_examples=40, deadline=None)
def test_backward_is_what_happens_event_by_event(replay, lengths, items_up, heaviest_first, units, **knobs):
    kernel = replay.Backward(**knobs)
    lists = replay.in_order(lists_of(lengths), items_up=items_up, heaviest_first=heaviest_first)
    launched = [x.tolist() for x in replay.tile_and_head(len(lists.tiles), 2, 1)]
    happened = event_by_event(kernel, lists, 4, list(zip(*launched, strict=True)), 2, units)
    assert kernel.replay(lists, 4, 2, 1, units) == pytest.approx(happened)


def test_backward_by_hand(replay):
    """A document of 256: four blocks of queries see its first tile of keys, two the second."""
    kernel = replay.Backward(step=2.0, tile=10.0, poll=0.5, free=0.5, visible=1.0, ask_early=False, buffers=1)
    lists = lists_of([256])
    # One unit: ten, and a step each time; the last addition is seen half a microsecond after its step, and
    # done one later. Then the second tile likewise, whose turns have all come.
    assert kernel.replay(lists, 1, 1, 1, 1) == (10 + 4 * 2 + 1.5) + (10 + 2 * 2 + 1.5)
    # Two units: the second tile is done with block 3 at 12 and may add when the first's addition is there, at
    # 13.5; block 2 at 15.5 + 0.5. So it ends half a microsecond and an addition later.
    assert replace(kernel, tile=0.0).replay(lists, 1, 1, 1, 2) == 4 * 2 + 1.5


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
    assert work[:15] == sorted(work, reverse=True)[:15], (
        "of the long one, whose last tile is the lightest of all"
    )
