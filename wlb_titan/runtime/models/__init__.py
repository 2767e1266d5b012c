"""Models that train here, and what is changed in them. Read `load.py` first, then `bases.py` and
`adoption.py`; `description.py` is what published files say of them, `checkpointing.py` is how layers are
recomputed and compiled, `weights.py` keeps what torchtitan would lose.
"""
