"""Documents as lengths: the stream that a job reads, mixtures of sources, the epochs' order."""

from wlb_titan.documents.mixture import Documents, Source

__all__ = ["Documents", "Source"]
