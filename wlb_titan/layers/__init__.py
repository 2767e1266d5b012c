"""A job's layers: where they lie on ranks, and what their tokens take there in bytes and seconds.

`layout.py` says where, `recompute.py` what a layer keeps and repeats, `rates.py` what a token takes on a
cluster, and `passes.py` adds up a pass of a pipeline stage. What lies below policies knows no more of a job.
Read `layout.py` and `rates.py` first.
"""
