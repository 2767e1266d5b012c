"""wlb_titan: workload-balanced long-context training on torchtitan (WLB-LLM).

Importing this package imports nothing heavy; the parts are `wlb_titan.planner` (numpy),
`wlb_titan.kernels` (torch, triton), `wlb_titan.corpus`, `wlb_titan.config` and `wlb_titan.runtime`
(the only part that knows torchtitan).
"""

__version__ = "0.1.0"
