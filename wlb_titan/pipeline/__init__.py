"""Pipelines as graphs: the passes of each rank under a schedule, what waits for what, and in which order
micro-batches run. Nothing here knows torch. Read `schedule.py` first, then `graph.py`; `order.py` and
`packflow.py` search orders on that graph.
"""
