"""Bytes: a step's peak on each pipeline rank, and what fits a device.

`recompute.py` says what each kind of activation checkpointing keeps, `layer.py` the bytes of a layer and of
the weights, `rank.py` walks a rank's passes with `slice_cache.py` beside it, `mix.py` chooses kinds under
which a run fits, and `fits.py` asks whether a step does. Read `rank.py` first.
"""
