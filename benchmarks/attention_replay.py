"""How long a launch of the Gluon kernels should take, replayed from the tile lists that they get, GPU or not.

    python benchmarks/attention_replay.py                          # measured on an H100, and replayed
    python benchmarks/attention_replay.py --rows FOLDER --kernels tree  # measured with this tree's kernels

Backward: tiles are taken in the order of the list, each by the multiprocessor that is free first. A step of
64 rows takes `step`. Its dQ is then added by a warp of its own, which waits for the tile's turn, sees it
`poll` later and `free` after that gives the buffer back, so that another step can hand over its own: the
next, or, of two buffers and warps, the one after. The addition is `visible` to the next tile later still.
Tiles wait for earlier ones of the list only, so one pass over the list is enough. Forward: blocks, masked
blocks and tiles take what the benchmark's grid says, and are dealt to the multiprocessors as the kernel does.
No memory is modelled: where a measurement lies far above its replay, the L2 cache is missed. What
gluon_launch.division chooses to meet that cache, one head after the other and few heads side by side, is
asked for by `blocks_first`, `pack` and `heads_at_a_time`.

`Forward()` and `Backward()` describe the kernels of this tree; their fields say what else can be asked
(`FORWARD`, `BACKWARD`). A change of the lists, the walk or the launch is judged by it before there is a GPU
to measure it on.
"""

import argparse
import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from attention_cases import cases
from common import show
from wlb_titan.kernels.gluon_launch import KEYS, LEAST_PACKED, ROWS, SECTION, packed, parts
from wlb_titan.kernels.tiles import MASK_COST, KeyTiles, key_tiles, query_tiles, steps
from wlb_titan.kernels.triton_launch import section as l2_section

from wlb_titan.commands.profile import GridCase

UNITS = 132  # multiprocessors of an H100
DIM = 128
RESULTS = Path(__file__).parent / "results" / "nvidia_h100"
# Element-wise kernels around the backward, ms of a query token and head: statistics 0.377, zeros 0.324, scale
# 0.714 and cast 0.527 for 64K tokens and 32 heads; zeros are gone by now, and scale and cast are one, as long
# as a cast.
AROUND = {"then": 1.943 / 65536 / 32, "tree": 0.904 / 65536 / 32}
CUTS = ((129, 129, 2032), (257, 257, 1020), (1024, 1024, 256), (8192, 8192, 16))  # of the grid


@dataclass(frozen=True)
class Forward:
    """The forward kernel, times in microseconds.

    block: of 128 keys; masked: what a masked one takes more; tile: start and end of a tile.
    heads_at_a_time: key heads that run through the list together; 0 for as many as the L2 cache holds.
    dynamic: each tile goes to the multiprocessor that is free first, instead of to and fro like a plough.
    pack: query heads are packed into a tile.
    heaviest_first: tiles are dealt by their work and not as listed.
    """

    block: float = 1.73
    masked: float = 0.3
    tile: float = 3.45
    heads_at_a_time: int = SECTION
    dynamic: bool = True
    pack: bool = True
    heaviest_first: bool = False

    def milliseconds(self, segments: np.ndarray, heads: int, kv_heads: int, units: int = UNITS) -> float:
        """Of the kernel on segments (S, 4) with so many heads."""
        shares = self.shares(self.pieces(segments, heads, kv_heads), units)
        return float((shares @ [self.tile, self.block, self.masked]).max()) / 1e3

    def shares(self, pieces: np.ndarray, units: int) -> np.ndarray:
        """(units, 3), the sums of the pieces that each multiprocessor takes."""
        if not self.dynamic:
            return to_and_fro(pieces, units)
        shares = np.zeros((units, 3))
        np.add.at(shares, free_first(pieces @ [self.tile, self.block, self.masked], units), pieces)
        return shares

    def pieces(self, segments: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
        """int64 (n, 3), of tiles and heads in the order in which they are dealt: 1, blocks, masked ones."""
        q_tokens, kv_tokens = extent(segments)
        pack = packed(heads // kv_heads) if self.pack else 1
        tiles = query_tiles(segments, q_tokens, tokens=2 * ROWS // pack)
        if self.heaviest_first:
            shared = tiles[:, 4] - tiles[:, 3]
            work = shared + MASK_COST * (tiles[:, 5] - tiles[:, 2] - shared)
            tiles = tiles[np.lexsort((tiles[:, 0], -work))]
        blocks = np.maximum(-(-(tiles[:, 5] - tiles[:, 2]) // KEYS), 1)
        masked = blocks - np.maximum(tiles[:, 4] - tiles[:, 3], 0) // KEYS
        heads //= pack
        wide = heads // kv_heads * side_by_side(self.heads_at_a_time, kv_tokens, kv_heads, 1)
        counts = np.stack([np.ones_like(blocks), blocks, masked], axis=1)
        return counts[tile_and_head(len(tiles), heads, wide)[0]]


@dataclass(frozen=True)
class Backward:
    """The backward kernel, times in microseconds.

    step: of 64 rows and 128 keys. tile: start and end of a tile; reasoned, as 6 us were measured when each
    was a program of its own, before whole lines were stored. poll, free, visible: see above; the warps that
    add are never the slower ones without turns, so free <= visible, and free + poll <= step.
    buffers: of dQ, each with a warp that adds.
    blocks_first: a program walks over blocks of queries and at each over its heads, instead of over heads.
    ask_early: the turn is asked for before the dQ is there.
    heads_at_a_time: as in `Forward`.
    pack: query heads are packed into a step, where their group is not split.
    split_by_work: a key head's queries are split where the heaviest tile would take longer than all units do
        together, and not where programs are fewer than units.
    items_up: a tile's items are walked in the order of their queries, and not as listed.
    heaviest_first: tiles are launched by their work, but not before those that they wait for; not as listed.
    """

    step: float = 2.5
    tile: float = 2.0
    poll: float = 0.6
    free: float = 0.4
    visible: float = 1.2
    buffers: int = 2
    blocks_first: bool = True
    ask_early: bool = True
    heads_at_a_time: int = SECTION
    pack: bool = True
    split_by_work: bool = True
    items_up: bool = False
    heaviest_first: bool = False

    def milliseconds(self, segments: np.ndarray, heads: int, kv_heads: int, units: int = UNITS) -> float:
        """Of the kernel on segments (S, 4) with so many heads."""
        group = heads // kv_heads
        pack = packed(group, LEAST_PACKED) if self.pack else 1
        lists = self.lists(segments, pack)
        work = steps(lists, ROWS // pack)
        split = parts(int(work.max()), float(work.sum()) * kv_heads / units, group)
        if not self.split_by_work:
            split = parts(units, len(work) * kv_heads, group)
        if split > 1 and pack > 1:
            pack, lists = 1, self.lists(segments, 1)
        wide = side_by_side(self.heads_at_a_time, extent(segments)[0], kv_heads, group) * split
        return self.replay(lists, heads, kv_heads * split, wide, units, pack) / 1e3

    def lists(self, segments: np.ndarray, pack: int) -> KeyTiles:
        """Those of steps of so many heads of each token."""
        tokens = ROWS // pack
        lists = key_tiles(segments, extent(segments)[1], tokens=tokens, block_n=KEYS, turn_rows=tokens)
        return in_order(lists, items_up=self.items_up, heaviest_first=self.heaviest_first)

    def replay(
        self, lists: KeyTiles, heads: int, programs: int, wide: int, units: int, pack: int = 1
    ) -> float:
        """Microseconds of a launch of so many programs a tile, which share the query heads."""
        each = heads // pack // programs
        tokens = ROWS // pack
        ready = np.zeros((heads // pack, max(len(lists.first_turns), 1)))  # when a counter came to its last
        begin = lists.items[:, 0] // tokens
        blocks = -(-lists.items[:, 3] // tokens) - begin
        counter = np.where(lists.items[:, 5] >= 0, lists.items[:, 4] + begin, -1)
        items = list(zip(blocks.tolist(), counter.tolist(), strict=True))
        of_tile = [items[begin:end] for begin, end in lists.tiles[:, 2:].tolist()]
        free = [0.0] * units
        for tile, program in zip(
            *map(np.ndarray.tolist, tile_and_head(len(of_tile), programs, wide)), strict=True
        ):
            rows = ready[program * each : (program + 1) * each]
            heapq.heapreplace(free, self.program(of_tile[tile], rows, free[0] + self.tile))
        return max(free)

    def program(self, items: list[tuple[int, int]], ready: np.ndarray, start: float) -> float:
        """When a program ends that starts then; `ready` (its heads, counters) is brought up to date.

        In step i the consumers are done at r and its adding warp adds at a, where n are the buffers:

            r_i = max(r_i-1 + step, a_i-n + free)
            a_i = max(r_i, a_i-n + visible, turn of i) + poll

        Both are maxima over paths of sums, so a_i is the latest of: r_0 and steps from there; and, for each
        turn j that came earlier, additions of one warp after the other from there, or steps from its freed
        buffer.
        """
        n = self.buffers
        computed, added, buffer = start, np.full(n, start), np.full(n, start)  # of the next steps' warps
        for blocks, counter in items:
            count = blocks * len(ready)
            if counter >= 0:
                window = ready[:, counter : counter + blocks][:, ::-1]
                window = window.T if self.blocks_first else window
                turn, poll, between = window.ravel() + self.poll, self.poll, self.visible + self.poll
                asked = 0.0 if self.ask_early else self.poll
            else:
                turn, poll, between, asked = np.full(count, -np.inf), 0.0, self.free, 0.0
            here = min(n, count)
            walked = self.step * np.arange(count)
            first = np.full(count, -np.inf)
            first[:here] = buffer[:here]
            first[0] = max(first[0], computed + self.step)
            first = np.maximum.accumulate(first - walked) + walked
            turn[:here] = np.maximum(turn[:here], added[:here] + poll)
            adds = np.maximum(turn, first + asked)
            for warp in range(here):
                own = adds[warp::n]
                waited = between * np.arange(len(own))
                adds[warp::n] = np.maximum.accumulate(own - waited) + waited
            handed = np.maximum.accumulate(adds - walked)[:-n] + walked[n:] + self.free - n * self.step
            np.maximum(adds[n:], handed + asked, out=adds[n:])
            computed = max(first[-1], handed[-1]) if count > n else first[-1]
            last = adds[count - here :]
            visible = self.visible if counter >= 0 else self.free
            buffer = np.append(buffer[here:], last + self.free)
            added = np.append(added[here:], last + visible)
            if counter >= 0:
                window[:] = (adds + self.visible).reshape(window.shape)
        return max(added.max(), computed)


def extent(segments: np.ndarray) -> tuple[int, int]:
    """Query and key tokens that the segments reach."""
    return int((segments[:, 0] + segments[:, 1]).max()), int((segments[:, 2] + segments[:, 3]).max())


def side_by_side(heads_at_a_time: int, tokens: int, kv_heads: int, group: int) -> int:
    """Key heads of a section; `tokens` of `group` heads are what one of them reads again and again."""
    if heads_at_a_time:
        return min(heads_at_a_time, kv_heads)
    read = torch.empty(tokens, kv_heads * group, DIM, dtype=torch.bfloat16, device="meta")
    return l2_section(read, read, 1, group)


def tile_and_head(tiles: int, heads: int, section: int) -> tuple[np.ndarray, np.ndarray]:
    """The tile and head of every program in launch order: kernels.gluon_common.tile_and_head."""
    number = np.arange(tiles * heads)
    before = number // (tiles * section) if tiles else number
    width = np.minimum(section, heads - before * section)
    rest = number - before * tiles * section
    return rest // width, before * section + rest % width


def to_and_fro(work: np.ndarray, units: int) -> np.ndarray:
    """(units, ...), the sums of work (n, ...): unit u has pieces u, 2 units - 1 - u, 2 units + u, ..."""
    units = min(units, len(work))
    rounds = -(-len(work) // units)
    empty = np.zeros((rounds * units - len(work), *work.shape[1:]), work.dtype)
    shares = np.concatenate([work, empty]).reshape(rounds, units, *work.shape[1:])
    shares[1::2] = shares[1::2, ::-1].copy()
    return shares.sum(axis=0)


def free_first(work: np.ndarray, units: int) -> np.ndarray:
    """The unit of each piece, where each goes to the one that is free first."""
    free = [(0.0, unit) for unit in range(units)]
    taken = []
    for piece in work.tolist():
        end, unit = free[0]
        heapq.heapreplace(free, (end + piece, unit))
        taken.append(unit)
    return np.array(taken)


def in_order(lists: KeyTiles, *, items_up: bool, heaviest_first: bool) -> KeyTiles:
    """The lists with items and tiles in another order: see `Backward`."""
    rows, listed = lists.tiles[np.argsort(lists.tiles[:, 0], kind="stable")], lists.items
    tile = np.repeat(np.arange(len(rows)), rows[:, 3] - rows[:, 2])  # of each item: they lie by key
    begin, full, tail, end, _, turn = listed.T.astype(np.int64)
    if items_up:
        listed = listed[np.lexsort((begin, tile))]
    if not heaviest_first:
        return lists._replace(items=listed)
    unmasked = tail - full
    work = np.bincount(tile, unmasked + MASK_COST * (end - begin - unmasked), minlength=len(rows))
    follows = np.bincount(tile, turn > 0, minlength=len(rows)) > 0  # a segment links it to the tile before
    for i in np.flatnonzero(follows)[::-1]:
        work[i - 1] = max(work[i - 1], work[i])
    return lists._replace(tiles=rows[np.argsort(-work, kind="stable")], items=listed)


# The kernels with which the rows under results/nvidia_h100 were measured, and those of this tree.
FORWARD = {
    "then": Forward(heads_at_a_time=0, dynamic=False, pack=False, heaviest_first=True),
    "tree": Forward(),
}
BACKWARD = {
    "then": Backward(
        tile=6.0,
        buffers=1,
        blocks_first=False,
        ask_early=False,
        heads_at_a_time=0,
        pack=False,
        split_by_work=False,
        items_up=True,
        heaviest_first=True,
    ),
    "tree": Backward(),
}


def timed(folder: Path, shape: list[int]) -> list[dict]:
    """Rows of gluon's passes."""
    return [
        row
        for row in read(folder / "attention_h100.jsonl")
        if row.get("implementation") == "gluon" and row["shape"] == shape and "forward_ms" in row
    ]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(folder: Path, heads: list[int], around: float) -> Iterator[tuple[str, np.ndarray, float, float]]:
    """Name, segments, and kernel ms forward and backward of each case that was timed.

    Where the backward's kernel was not timed by itself, what surrounds it is taken off: `around`, by the rows
    of queries and their heads.
    """
    shape = [*heads, DIM, DIM]
    segments = {case.name: case.segments.numpy() for case in cases()}
    for cut in map(GridCase._make, CUTS):
        segments[f"{cut.segments:,} documents of {cut.q_len:,}"] = cut.rows().numpy()
    times = {}
    for row in timed(folder, shape):
        cut = row.get("cut")
        name = f"{cut[2]:,} documents of {cut[0]:,}" if cut and cut[0] == cut[1] else row["case"]
        times[name] = row["forward_ms"], row["backward_ms"]
    alone = folder / "backward_kernels_h100.jsonl"
    kernels = {
        row["case"]: row["kernels"]["gluon_backward_kernel"][0]
        for row in (read(alone) if alone.exists() else ())
        if row.get("impl") == "gluon" and row["shape"] == shape
    }
    for name, rows in segments.items():
        if name in times:
            forward, backward = times[name]
            rest = around * extent(rows)[0] * heads[0]
            yield name, rows, forward, kernels.get(name, backward - rest)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=Path, default=RESULTS, help="folder of attention_h100.jsonl")
    parser.add_argument("--kernels", choices=tuple(AROUND), default="then", help="which were measured")
    return parser


def main() -> None:
    parser = arguments()
    parser.add_argument("--heads", default=["32:4", "32:32"], nargs="+", help="query and key heads")
    parser.add_argument("--units", type=int, default=UNITS, help="multiprocessors that do the work")
    options = parser.parse_args()
    found = [
        (heads, *case)
        for heads in ([*map(int, text.split(":"))] for text in options.heads)
        for case in measured(options.rows, heads, AROUND[options.kernels])
    ]
    columns = {"kernel ms": "{name}", "heads": "{heads}"}
    columns |= {which: f"{{{which}:.3f}}" for which in ("measured", *FORWARD)}
    for direction, kernels in enumerate((FORWARD, BACKWARD)):
        print("\nbackward\n" if direction else "forward\n")
        show(
            columns,
            (
                {"name": name, "heads": ":".join(map(str, heads)), "measured": times[direction]}
                | {which: one.milliseconds(segments, *heads, options.units) for which, one in kernels.items()}
                for heads, name, segments, *times in found
            ),
        )


if __name__ == "__main__":
    main()
