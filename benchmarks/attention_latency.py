"""The coefficients of the latency model of our kernels on Hopper, from measured times; no GPU is needed.

    python benchmarks/attention_latency.py                               # what lies in results/nvidia_h100
    python benchmarks/attention_latency.py --rows FOLDER --kernels tree  # measured with the tree's kernels

Prints what `hopper` of wlb_titan/cost/attention_kernels.py is made of, how well it describes the grid, and
how well the 20 packs that are not in the grid are predicted: as a replay of the kernels that were measured,
and as the planner does it, in closed form, of the tree's.

Features are tiles, blocks, programs and steps of the very lists that the kernels get, dealt to the
multiprocessors as those kernels did (attention_replay.py). So times of earlier kernels tell those of the
tree's: what the backward waited for its turns is the replay's and is taken off. What surrounds the backward,
and what a program costs to start and end, are not found in the grid; they are those of the replay.

Left out are times that are the host's, those of fewer than four tiles a multiprocessor, and backward times of
earlier kernels with several segments: the heaviest tiles of all documents came first, and each waited for
memory.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from attention_cases import cases, packs
from attention_replay import (
    AROUND,
    BACKWARD,
    DIM,
    FORWARD,
    ROWS,
    UNITS,
    Backward,
    Forward,
    arguments,
    extent,
    read,
    timed,
)
from wlb_titan.kernels.gluon_launch import division, packed
from wlb_titan.kernels.schedule import schedule_of
from wlb_titan.kernels.tiles import steps

from wlb_titan.commands.profile import GridCase
from wlb_titan.cost.attention_kernels import hopper, non_negative

HOST = {"forward": 0.5, "backward": 2.0}  # ms below which a time is the host's
GOAL = 0.05  # error of a pack's forward and backward together
TILES = 4  # a multiprocessor
ROUNDS = 4
HEADS = (32, 4)


def forward_fit(cases: list[np.ndarray], ms: np.ndarray, kernel: Forward) -> tuple[Forward, np.ndarray]:
    """The kernel with the costs that describe the times best, and predicted over measured time."""
    pieces = [kernel.pieces(segments, *HEADS) for segments in cases]
    for _ in range(ROUNDS):
        costs = [kernel.tile, kernel.block, kernel.masked]
        shares = [kernel.shares(piece, UNITS) for piece in pieces]
        features = np.array([share[(share @ costs).argmax()] for share in shares]) / ms[:, None] / 1e3
        tile, block, masked = non_negative(features, np.ones(len(ms))).tolist()
        kernel = replace(kernel, tile=tile, block=block, masked=masked)
    return kernel, features @ [tile, block, masked]


def backward_fit(
    cases: list[np.ndarray], ms: np.ndarray, kernel: Backward, around: float
) -> tuple[Backward, np.ndarray]:
    """The kernel with the step that describes the times best, and predicted over measured time."""
    each = np.array([backward_steps(kernel, segments) for segments in cases]) / 1e3
    for _ in range(ROUNDS):
        rest = np.array([backward_ms(kernel, around, segments) for segments in cases]) - each * kernel.step
        step = non_negative((each / ms)[:, None], 1 - rest / ms)
        kernel = replace(kernel, step=float(step[0]))
    return kernel, (rest + each * kernel.step) / ms


def backward_steps(kernel: Backward, segments: np.ndarray) -> float:
    """Steps of all heads, a multiprocessor."""
    pack = packed(HEADS[0] // HEADS[1]) if kernel.pack else 1
    return float(steps(kernel.lists(segments, pack), ROWS // pack).sum()) * HEADS[0] / pack / UNITS


def backward_ms(kernel: Backward, around: float, segments: np.ndarray) -> float:
    """With the kernels around it."""
    return kernel.milliseconds(segments, *HEADS) + around * extent(segments)[0] * HEADS[0]


def measured_divisions(folder: Path) -> list[str]:
    """The backward of attention_cases.py as the tree divides its work, measured beside the closed form."""
    lines, errors = [], []
    rows = read(folder / "attention_divisions_h100.jsonl")
    for case in cases():
        pieces = case.segments.numpy().astype(np.int64)
        q_tokens, kv_tokens = extent(pieces)
        schedule = schedule_of(case.segments, q_tokens, kv_tokens, torch.device("cpu"))
        sharding = [np.stack([0 * pieces[:, 0], pieces[:, 3] - pieces[:, 1], pieces[:, 1]], axis=1)]
        of_case = [row for row in rows if row["case"] == case.name and row.get("deterministic", True)]
        for heads in dict.fromkeys(tuple(row["shape"][:2]) for row in of_case):
            divided = division(schedule, *heads, UNITS)._asdict()
            same = [
                row["ms"]
                for row in of_case
                if (*row["shape"][:2],) == heads and divided.items() <= row.items()
            ]
            if same:
                latency = hopper(128, heads[0], group=heads[0] // heads[1])
                seconds = latency.seconds(sharding, held=np.array([kv_tokens]))
                errors.append(float(seconds[0, 1]) * 1e3 / same[0] - 1)
                lines.append(f"  {case.name}, {heads[0]}:{heads[1]}: {same[0]:.2f} ms, {errors[-1]:+.1%}")
    return [
        f"backward as the tree divides it, closed form beside measured: {within(np.array(errors))}",
        *lines,
    ]


def within(errors: np.ndarray) -> str:
    return (
        f"{(np.abs(errors) < GOAL).sum()} of {len(errors)} within {GOAL:.0%}, "
        f"mean {np.abs(errors).mean():.1%}, from {errors.min():+.1%} to {errors.max():+.1%}"
    )


def grid(rows: list[dict], direction: str, kernels: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Segments and ms of the cases that the fit is made of."""
    cases, ms = [], []
    for row in rows:
        if row["kind"] != "grid" or row[f"{direction}_ms"] < HOST[direction]:
            continue
        cut = GridCase(*row["cut"])
        segments = cut.rows().numpy()
        if direction == "forward":
            tells = len(FORWARD[kernels].pieces(segments, *HEADS)) >= TILES * UNITS
        else:
            tells = cut.segments == 1 or kernels == "tree"
        if tells:
            cases.append(segments)
            ms.append(row[f"{direction}_ms"])
    return cases, np.array(ms)


def main() -> None:
    options = arguments().parse_args()
    rows = timed(options.rows, [*HEADS, DIM, DIM])
    around = AROUND[options.kernels]

    forward, ratios = forward_fit(*grid(rows, "forward", options.kernels), FORWARD[options.kernels])
    print(f"forward: tile {forward.tile:.3f}, block {forward.block:.3f}, masked {forward.masked:.3f} us")
    print(f"  {len(ratios)} of the grid met within {np.median(np.abs(ratios - 1)):.1%} in the median")
    backward, ratios = backward_fit(
        *grid(rows, "backward", options.kernels), BACKWARD[options.kernels], around
    )
    print(
        f"backward: step {backward.step:.3f}, program {backward.tile:g} us, "
        f"query around it {around * 1e3 * UNITS:.4f} us"
    )
    print(f"  {len(ratios)} of the grid met within {np.median(np.abs(ratios - 1)):.1%} in the median")

    def replayed_ms(segments: np.ndarray, kernels: str) -> float:
        """Of both passes of the kernels, at the costs that were fitted."""
        ahead = replace(FORWARD[kernels], tile=forward.tile, block=forward.block, masked=forward.masked)
        back = replace(BACKWARD[kernels], step=backward.step)
        return ahead.milliseconds(segments, *HEADS) + backward_ms(back, AROUND[kernels], segments)

    measured = {row["case"]: row["forward_ms"] + row["backward_ms"] for row in rows if row["kind"] == "packs"}
    judged = [(pack, pack.segments.numpy()) for pack in packs() if pack.name in measured]
    ms = np.array([measured[pack.name] for pack, _ in judged])
    then, tree = (
        np.array([replayed_ms(segments, kernels) for _, segments in judged])
        for kernels in (options.kernels, "tree")
    )
    latency = hopper(128, HEADS[0], group=HEADS[0] // HEADS[1])

    def planned_ms(tail: float) -> np.ndarray:
        """Of both passes, in closed form."""
        forward, backward = (replace(cost, tail=tail) for cost in (latency.forward, latency.backward))
        tailed = replace(latency, forward=forward, backward=backward)
        return 1e3 * np.array([tailed.seconds(pack.shards)[pack.rank].sum() for pack, _ in judged])

    best = min(np.arange(16) / 50, key=lambda tail: float(np.abs(planned_ms(tail) / tree - 1).mean()))
    print(f"tail: {best:g} is closest to a replay of the tree's kernels")
    print(f"packs, replay of the kernels that were measured: {within(then / ms - 1)}")
    print("\n".join(measured_divisions(options.rows)))
    beside = "measured" if options.kernels == "tree" else "beside a replay of the tree's kernels"
    errors = planned_ms(latency.forward.tail) / (ms if options.kernels == "tree" else tree) - 1
    print(f"packs, closed form {beside}: {within(errors)}")


if __name__ == "__main__":
    main()
