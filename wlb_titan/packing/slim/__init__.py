"""Policies of slices: SlimPack. Read `slim.py` first, then `dp_merge.py` and `micropacks.py`, then `flow.py`.

The asymmetric partition (backward passes with micro-batches of their own) is `asymmetric.py` here and
`runtime/pipeline/regroup.py` there. Others meet it in two hooks of `PackingPolicy.Config`: `regroups` and
`pass_times`.
"""
