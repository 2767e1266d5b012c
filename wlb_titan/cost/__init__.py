"""The time that work takes: hardware, attention, linear layers, the workload of a document."""
