"""The life of a run around its steps: folder, checkpoints, messages, and an end that says why.

Read `dump_folder` first, then `checkpoints` and `alarm`.
"""
