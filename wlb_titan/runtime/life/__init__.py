"""What a run needs besides steps: its folder, checkpoints, messages, and an end that says why.

Read `dump_folder` first, then `checkpoints` and `alarm`.
"""
