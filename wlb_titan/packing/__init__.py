"""Packing policies: from the stream of documents to the micro-batches of one step."""

from wlb_titan.packing.policy import POLICIES, Packing, PackingPolicy, VariableLengthPolicy

__all__ = ["POLICIES", "Packing", "PackingPolicy", "VariableLengthPolicy"]
