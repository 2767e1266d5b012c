"""One rank of a big job, alone in a process: dry runs (without memory) and rehearsals (measured).

Read `process.py` first, then `lone.py`, then `dry_run.py` with `dry_trace.py`, or `rehearsal.py`.
"""
