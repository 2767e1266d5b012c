"""The pipeline as torch runs it. Read `build.py` first, then `stage.py` and `regroup.py`."""
