"""What `auto` takes where kernels were timed: the fastest that a committed run has shown right there.

No torch here, as predictions follow the same constants (wlb_titan/cost/attention_kernels.py).
"""

HeadDims = tuple[int, int]  # of queries and keys, D, and of values, Dv

HOPPER: dict[HeadDims, tuple[str, str]] = {(128, 128): ("gluon", "triton")}
"""By head dims, what computes the forward and the backward; of benchmarks/results/nvidia_h100:

attention_h100.jsonl: Gluon's forward took less time than Triton's in every case. attention_turns_h100.jsonl:
132 checks of both found nothing wrong. But Gluon's backward has become persistent since, and no run of
today's has been committed: so Triton's is taken.
"""

HOPPER_FAMILY, BLACKWELL_FAMILY = 9, 10
FASTEST = {HOPPER_FAMILY: HOPPER}
"""By the major number of an NVIDIA GPU's compute capability."""
