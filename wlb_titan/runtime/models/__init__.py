"""Models that train here, and what is changed in them. Read `load.py` first, then `bases.py` and
`adoption.py`; `description.py` is what published files say of them, `blocks.py` compiles and checkpoints
layers, `weights.py` keeps what torchtitan would lose.
"""
