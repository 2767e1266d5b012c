"""Policies of slices: SlimPack.

Read `slim` first, then `dp_merge` and `micropacks`, which `packer` puts together, then `flow`.
"""
