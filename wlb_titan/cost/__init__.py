"""How long work takes, and on what: hardware, attention, linear layers, the workload of a document."""
