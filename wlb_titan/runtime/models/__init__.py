"""Models that train here, and what is changed in them. Read `load.py` first, then `bases.py` and
`adoption.py`; `blocks.py` compiles and checkpoints layers, `weights.py` keeps what torchtitan would lose.
"""
