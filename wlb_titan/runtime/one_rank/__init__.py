"""One rank of a big job, alone in a process: dry runs (without memory) and rehearsals (measured).

Read `process` first, then `trainer`, then `dry_run` with `dry_trace`, or `rehearsal`.
"""
