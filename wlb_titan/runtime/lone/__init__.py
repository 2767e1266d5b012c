"""Ranks of a big job alone in a process, for dry runs (without memory) and rehearsals (measured).

Read `group` first, then `trainer`, then `dryrun` or `rehearse`.
"""
