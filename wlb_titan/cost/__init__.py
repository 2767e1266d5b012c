"""Seconds: what work takes on a cluster, of attention, of everything else, and of a whole document.

`cluster.py` has the hardware, `attention_latency.py` the time of the kernel on segments (its constants in
`attention_kernels.py` or a measured `profile.py`), `told.py` what a trace tells of layers, and `workload.py`
is what packing balances. Read `workload.py` first.
"""
