"""Packing policies: from the stream of documents to the micro-batches of one step.

`policy.py` has the interface and `arrivals.py` what policies share; then a file for each policy, `plain.py`
the simplest, and `slim/` for slices. `once.py` is validation's. `rules.py` checks a user's own policy,
`predicted.py` prices drafts and chooses what layers recompute. Read `policy.py` and `plain.py` first.
"""

from wlb_titan.packing.policy import POLICIES, Packing, PackingPolicy, VariableLengthPolicy

__all__ = ["POLICIES", "Packing", "PackingPolicy", "VariableLengthPolicy"]
