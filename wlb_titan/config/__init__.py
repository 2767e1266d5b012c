"""Our settings in TOML: what a user's file says becomes a typed configuration.

`settings.py` has the sections of [wlb], `documents.py` what those of the corpus mean, and `load.py` reads a
whole experiment by the engine in `wlb_titan.toml`. Nothing here imports torchtitan. Read `settings.py` first.
"""
