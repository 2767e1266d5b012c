"""How should Gluon's backward divide its work? Times other divisions than gluon_launch.py's own on this GPU.

    python benchmarks/attention_divisions.py

For each number of heads and each case of attention_cases.py a row a division, the shipped one first, in
milliseconds of the whole backward (statistics before and dQ's order after it included), for nine minutes in
all. Every division's gradients are compared with the shipped one's, and computed twice: they must repeat bit
for bit. The rows are written to attention_divisions.jsonl.
"""

import json
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from attention_cases import Case, cases
from wlb_titan.kernels import gluon_launch
from wlb_titan.kernels.gluon_launch import Division
from wlb_titan.kernels.schedule import schedule_of
from wlb_titan.kernels.segments import Options, Saved, Shape
from wlb_titan.kernels.self_check import make_inputs

from wlb_titan.commands.profile import time_call

MINUTES = 9
KEY_HEADS = (4, 32, 8)  # of 32 query heads


def others(group: int, kv_heads: int) -> list[Division]:
    """Packed and not, one head after the other and all at once, few and many key heads side by side."""
    sections = sorted({min(n, kv_heads) for n in (1, 2, 4, 8, 16)})
    found = [Division(1, gluon_launch.packed(group, gluon_launch.LEAST_PACKED), False, n) for n in sections]
    if group > 1:
        found += [Division(1, 1, True, n) for n in sections]
        found += [Division(split, 1, False, kv_heads) for split in (1, 2)]
    return list(dict.fromkeys(found))


def rows(case: Case, shape: Shape, end: float) -> Iterator[dict]:
    """A row for each division, until `end`."""
    q, k, v, dout = make_inputs(case.segments, shape, torch.bfloat16, "cuda")
    schedule = schedule_of(case.segments, q.shape[0], k.shape[0], q.device)
    options = Options(scale=shape.dim**-0.5)
    saved = Saved(q, k, v, *gluon_launch.forward(q, k, v, schedule, options))
    units = gluon_launch.units(q.device)
    shipped = gluon_launch.division(schedule, shape.q_heads, shape.kv_heads, units)
    want = None
    for divided in [shipped, *others(shape.q_heads // shape.kv_heads, shape.kv_heads)]:
        if time.monotonic() > end:
            return
        call = partial(gluon_launch.backward, dout, None, saved, schedule, options, divided)
        got, again = call(), call()
        want = want or got
        error = max(
            ((a.float() - b).norm() / b.float().norm()).item() for a, b in zip(got, want, strict=True)
        )
        repeats = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
        yield {
            "case": case.name,
            "shape": [*shape],
            **divided._asdict(),
            "ms": time_call(call, "cuda", 50),
            "wrong": not error <= 1e-2 or not repeats,
        }


def main() -> None:
    end = time.monotonic() + 60 * MINUTES
    with Path("attention_divisions.jsonl").open("a") as file:
        for key_heads, case in product(KEY_HEADS, cases()):
            for row in rows(case, Shape(32, key_heads, 128, 128), end):
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(row, flush=True)


if __name__ == "__main__":
    main()
