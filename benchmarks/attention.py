"""How fast is the attention, against PyTorch's own, on long documents, context-parallel shards and short
documents?

    python benchmarks/attention.py                    # at most 9 minutes on one H200 python
    benchmarks/attention.py --device cpu       # plumbing only: the reference, on lengths divided by 256

First every implementation is checked (attention_check.py); one that is wrong is not timed. Then each case is
timed, forward and backward, the most telling first, until the time is up; what was left out is named. TFLOP/s
count the operations of the real mask: 2 x pairs x heads x (D + Dv) forward, 2.5 times that backward. Writes
benchmarks/results/<device>/attention.json and prints the same as a table.
"""

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attention_peers as peers
import torch
from attention_cases import Case, cases
from attention_check import IMPLEMENTATIONS, check, supports
from wlb_titan.kernels import varlen_attention
from wlb_titan.kernels.measure import Shape, flops, make_inputs, time_call

SHAPES = [Shape(32, kv_heads, dim, dim) for dim in (128, 64) for kv_heads in (4, 32)]


def competitors(case: Case, shape: Shape, tensors, names: list[str]) -> Iterator[tuple[str, Callable]]:
    """(name, what makes the call) for everything that can run this case."""
    q, k, v = tensors
    for name in names:
        if supports(name, shape):
            yield name, partial(ours, case, q, k, v, name)
    if q.device.type != "cuda":
        return
    yield "varlen_attn", partial(peers.varlen, case, q, k, v, repack=False)
    if "rank" in case.name or case.group in "ce":
        yield "varlen_attn, re-pack", partial(peers.varlen, case, q, k, v, repack=True)
    if case.dense:
        yield "cuDNN dense", partial(peers.cudnn, q, k, v)
    if case.group in "cd" or "of 8" in case.name:
        yield "FlexAttention", partial(peers.flex, case, q, k, v)


def ours(case: Case, q, k, v, implementation: str) -> peers.Call:
    def call():
        return varlen_attention(q, k, v, case.segments, implementation=implementation)

    call.leaves = (q, k, v)
    return call


def measure(case: Case, shape: Shape, names: list[str], device: str) -> Iterator[dict]:
    """One row for each competitor; the error of one is its row's text and does not stop the rest."""
    *tensors, dout = make_inputs(case.segments, shape, torch.bfloat16, device)
    tensors = [x.requires_grad_() for x in tensors]
    work = flops(case.segments, shape)
    for name, make in competitors(case, shape, tensors, names):
        row = {"group": case.group, "case": case.name, "shape": shape.name, "implementation": name}
        try:
            call = make()
            with torch.no_grad():
                forward = time_call(call, device)
            gradients = partial(torch.autograd.grad, call(), call.leaves, dout, retain_graph=True)
            backward = time_call(gradients, device)
            if hasattr(call, "build_mask"):
                row["mask_ms"] = time_call(call.build_mask, device)
        except Exception as error:
            yield row | {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        yield row | {
            "forward_ms": forward,
            "backward_ms": backward,
            "forward_tflops": work / forward / 1e9,
            "backward_tflops": 2.5 * work / backward / 1e9,
        }


def matmul_tflops(device: str, n: int = 8192) -> float:
    """The device's own rate: a square bf16 product of random numbers."""
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / time_call(lambda: a @ b, device) / 1e9


def print_row(row: dict) -> None:
    text = row.get("error") or (
        f"{row['forward_ms']:9.3f} ms {row['forward_tflops']:6.4g} TFLOP/s"
        f" {row['backward_ms']:9.3f} ms {row['backward_tflops']:6.4g} TFLOP/s"
    )
    print(f"{row['group']} {row['case']:38} {row['shape']:20} {row['implementation']:21} {text}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=8.5, help="stop starting new cases after this long")
    parser.add_argument("--groups", default="abcde", help="of the cases, see attention_cases.py")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/<device>/attention.json")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    gpu = torch.device(options.device).type == "cuda"
    name = torch.cuda.get_device_name(options.device) if gpu else "cpu"
    folder = re.sub(r"\W+", "_", name.lower().replace("nvidia ", ""))
    output = options.output or Path(__file__).parent / "results" / folder / "attention.json"

    wrong = check(small=True) if gpu else {"reference": []}
    names = [n for n in (IMPLEMENTATIONS if gpu else ["reference"]) if not wrong[n]]
    result = {
        "device": name,
        "torch": torch.__version__,
        "wrong": {n: lines for n, lines in wrong.items() if lines},
        "matmul_tflops": matmul_tflops(options.device, 8192 if gpu else 256),
        "rows": [],
        "left_out": [],
    }
    print(f"{name}, torch {torch.__version__}, bf16 matmul {result['matmul_tflops']:.0f} TFLOP/s")
    wanted = [c for c in cases(1 if gpu else 256) if c.group in options.groups]
    wanted.sort(key=lambda case: "acbde".index(case.group))
    for shape in SHAPES:
        for case in wanted:
            if time.monotonic() > end:
                result["left_out"].append(f"{case.name}, {shape.name}")
                continue
            for row in measure(case, shape, names, options.device):
                result["rows"].append(row)
                print_row(row)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(result['rows'])} rows, {len(result['left_out'])} cases left out; wrote {output}")


if __name__ == "__main__":
    main()
