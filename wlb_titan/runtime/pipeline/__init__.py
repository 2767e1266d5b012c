"""The pipeline as torch runs it. Read `build.py` first, then `keys.py`, `stage.py` and `regroup.py`."""
