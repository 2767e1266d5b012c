"""Which tile shapes are fastest? Times the alternatives of kernels/configs.py on this GPU and prints the
table.

    python benchmarks/attention_tune.py --minutes 9 [--dims 128 64] [--output tune.json]

One pass at a time (forward, key_tiles, query_tiles), for each head dim, on long segments and on short ones,
grouped heads (32:4); the table has one configuration for both. A configuration that does not compile, does
not fit or computes something else than the first one is reported and dropped. Ends with lines to paste into
kernels/configs.py.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from attention_cases import lognormal, short, whole
from torch import Tensor
from wlb_titan.kernels import triton_launch
from wlb_titan.kernels.configs import Config, choose
from wlb_titan.kernels.inputs import Shape, make_inputs
from wlb_titan.kernels.options import Options
from wlb_titan.kernels.schedule import schedule_of

from wlb_titan.commands.profile_attention import time_call

OPTIONS = Options(scale=0.1)
PASSES = ("forward", "key_tiles", "query_tiles")
SEGMENTS = {
    True: whole([32768, *lognormal(32768, 4096, 0, 16384)]),
    False: whole(short(65536, 100, 2000, 1)),
}


def candidates(which: str, dim: int) -> list[Config]:
    """The table's own configuration first, then the shapes that compiled for sm_90 with few or no spills."""
    shapes = {
        "forward": [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (64, 128, 4, 2), (64, 64, 4, 3)],
        "key_tiles": [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2)],
        "query_tiles": [(128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3)],
    }[which]
    if dim <= 64:
        shapes = [*shapes, *[(m, n, w, s + 1) for m, n, w, s in shapes]]
    found = [Config(*shape) for shape in shapes]
    if which == "key_tiles":
        found += [Config(m, 128, 8, 2, transposed=True) for m in (32, 64)]
    return list(dict.fromkeys([choose(which, (dim, dim), tma=True), *found]))


def calls(shape: Shape, segments: Tensor) -> dict[str, Callable[[Config], tuple[Tensor, ...]]]:
    """For each pass, a function that runs it with a configuration and returns what it computed."""
    q, k, v, dout = make_inputs(segments, shape, torch.bfloat16, "cuda")
    schedule = schedule_of(segments, q.shape[0], k.shape[0], q.device)
    out, lse = triton_launch.forward(q, k, v, schedule, OPTIONS, tma=True)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    statistics = triton_launch.row_statistics(dout, None, out, lse)

    def forward(config: Config):
        return triton_launch.forward(q, k, v, schedule, OPTIONS, tma=True, config=config)

    def key_tiles(config: Config):
        triton_launch.key_tiles_pass(dout, q, k, v, dk, dv, statistics, schedule, OPTIONS, True, config)
        return dk, dv

    def query_tiles(config: Config):
        triton_launch.query_tiles_pass(dout, q, k, v, dq, statistics, schedule, OPTIONS, True, config)
        return (dq,)

    return {"forward": forward, "key_tiles": key_tiles, "query_tiles": query_tiles}


def tune(call: Callable, configs: list[Config], end: float) -> Iterator[dict]:
    """One row for each configuration, until `end`."""
    want = None
    for config in configs:
        if time.monotonic() > end:
            return
        row = {"config": repr(config)}
        try:
            got = [x.float().clone() for x in call(config)]
            want = want or got
            error = max(((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))
            row |= {"error": f"differs by {error:.1e}"} if not error <= 1e-2 else {}
            row["ms"] = time_call(lambda config=config: call(config), "cuda", 100)
        except Exception as error:  # too much shared memory, say
            row["error"] = f"{type(error).__name__}: {error}"[:200]
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 64, 256, 96])
    parser.add_argument("--output", type=Path, default=Path("attention_tune.json"))
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    results, table = [], []
    for dim in options.dims:
        for long, segments in SEGMENTS.items():
            by_pass = calls(Shape(32, 4, dim, dim), segments)
            for which in PASSES:
                rows = list(tune(by_pass[which], candidates(which, dim), end))
                label = {"pass": which, "dim": dim, "long": long}
                for row in rows:
                    print(f"{which:11} {dim:4} {'long' if long else 'short':5}", row, flush=True)
                results += [label | row for row in rows]
                good = [row for row in rows if "error" not in row]
                if good:
                    best = min(good, key=lambda row: row["ms"])
                    table.append(
                        f"{label}: {best['config']}, {best['ms']:.3f} ms, the table's {rows[0].get('ms')}"
                    )
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(table))


if __name__ == "__main__":
    main()
