"""Attention in the model: the module that micro-batches' segments reach, and who exchanges keys.

Read `module` first, then `all_gather` and `ulysses`, then `kv_cache` for slices.
"""
