"""Documents as lengths: the stream that a job reads, mixtures of sources, the epochs' order."""
