"""Attention in the model: the module that micro-batches' segments reach, and who exchanges keys.

Read `module.py` first, then `exchange.py`, then `kv_cache.py` for slices.
"""
