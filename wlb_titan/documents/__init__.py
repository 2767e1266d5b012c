"""Documents as lengths: the endless stream that a job reads, before any token is looked at.

`mixture.py` orders the documents of one or several sources, `stream.py` cuts them into the pieces of a step,
`lengths.py` has distributions where there is no corpus, `permutation.py` an epoch's order. Read `stream.py`
first.
"""

from wlb_titan.documents.mixture import Documents, Source

__all__ = ["Documents", "Source"]
