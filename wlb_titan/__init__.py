"""wlb_titan: workload-balanced long-context training on torchtitan (WLB-LLM).

Importing this package imports nothing else; docs/architecture.md says what its parts are.
"""

__version__ = "0.1.0"
