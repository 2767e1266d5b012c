"""The pipeline as torch runs it, for micro-batches of any length.

Read `build` first, then `schedules`, `stage`, `packflow` and `regroup`.
"""
