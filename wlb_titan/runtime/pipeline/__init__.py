"""The pipeline as torch runs it. Read `build` first, then `schedules`, `stage` and `regroup`."""
