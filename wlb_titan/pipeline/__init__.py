"""Pipeline schedules: their actions, the graph of what waits for what, the order of micro-batches."""
