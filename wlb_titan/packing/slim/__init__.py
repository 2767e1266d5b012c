"""Policies of slices: SlimPack.

Read `slim` first, then `micropacks`, `flow` and `dp_merge`.
"""
