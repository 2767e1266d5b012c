"""wlb_titan: workload-balanced long-context training on torchtitan (WLB-LLM).

Importing this package imports nothing else; docs/architecture.md says what its parts are. What other trainers
use, `wlb_titan.balance` and what stands beside it, is imported when it is first asked for, without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wlb_titan.balancing import Assignment, balance, causal
    from wlb_titan.sampler import BalancedBatchSampler

__all__ = ["Assignment", "BalancedBatchSampler", "balance", "causal"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "sampler" if name == "BalancedBatchSampler" else "balancing"
    return getattr(importlib.import_module(f"wlb_titan.{module}"), name)
