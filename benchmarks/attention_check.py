"""Are the kernels right on this GPU? Every implementation, bf16, against the reference in float32.

    python benchmarks/attention_check.py                      # all, exit status 1 if any is wrong
    compute-sanitizer --tool memcheck python benchmarks/attention_check.py --small

Fresh random inputs at every run, outputs full of NaN beforehand, relative error (norm over norm) at most
1e-2.
"""

import argparse
import sys
import time

import torch
from attention_cases import lognormal, shard, whole
from wlb_titan.kernels import varlen_attention
from wlb_titan.kernels.measure import Shape, make_inputs

IMPLEMENTATIONS = ("triton", "triton_fused_dq", "warp_specialized", "gluon")
SHAPES = [
    Shape(heads, kv_heads, dim, v_dim)
    for dim, v_dim in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    for heads, kv_heads in ((4, 4), (8, 1))
]
SEGMENTS = {
    "ragged": whole([300, 1, 77, 1500, 13, 12, 11, 640]),
    "shard": shard([3000, 500, 40, 6000], 4, 1),
    "long": whole([5000, 200]),
    "mix": shard(lognormal(20000, 500, 0, 8000), 2, 0),
}


def supports(implementation: str, shape: Shape) -> bool:
    if implementation in ("gluon", "warp_specialized"):
        return {shape.dim, shape.v_dim} <= {64, 128}
    return implementation != "triton_fused_dq" or shape.dim <= 128


def errors(implementation: str, segments, shape: Shape, seed: int, device: str = "cuda") -> dict[str, float]:
    """Relative error of the output and of each gradient."""
    q, k, v, dout = make_inputs(segments, shape, torch.bfloat16, device, seed)

    def run(implementation: str, dtype: torch.dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = varlen_attention(*leaves, segments, implementation=implementation)
        return out, *torch.autograd.grad(out, leaves, dout.to(dtype))

    want = run("reference", torch.float32)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new tensors with NaN
    got = run(implementation, torch.bfloat16)
    torch.use_deterministic_algorithms(False)
    return {
        name: ((a.float() - b).norm() / b.norm()).item()
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True)
    }


def check(small: bool = False, device: str = "cuda", implementations=IMPLEMENTATIONS) -> dict[str, list[str]]:
    """The failures of each implementation, each a line; prints what it does."""
    failures = {name: [] for name in implementations}
    seed = time.time_ns() % 2**31
    for implementation in implementations:
        for shape in SHAPES:
            for name, segments in SEGMENTS.items():
                if not supports(implementation, shape) or (small and (name != "ragged" or shape.dim > 128)):
                    continue
                try:
                    found = errors(implementation, segments, shape, seed, device)
                    bad = not all(e <= 1e-2 for e in found.values())
                    text = ", ".join(f"{key} {e:.2e}" for key, e in found.items())
                except (
                    Exception
                ) as error:  # a kernel that does not compile or launch is a failure, not the end
                    bad, text = True, f"{type(error).__name__}: {error}"[:300]
                line = f"{implementation}, {shape.name}, {name}: {text}"
                print("WRONG" if bad else "right", line, flush=True)
                if bad:
                    failures[implementation].append(line)
    return failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="one small case a shape, for compute-sanitizer")
    sys.exit(any(check(parser.parse_args().small).values()))
