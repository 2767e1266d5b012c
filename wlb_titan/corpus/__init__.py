"""Documents on disk: tokenized once, by `wlb-titan prepare` or another tool, memory-mapped afterwards.

Reading (`Corpus`) needs numpy and pyarrow only. Writing (`wlb_titan.corpus.prepare`) needs `datasets` and
`tokenizers` too and is imported by those who write.
"""

from wlb_titan.corpus.corpus import Corpus
from wlb_titan.corpus.folder import Manifest
from wlb_titan.errors import CorpusError

__all__ = ["Corpus", "CorpusError", "Manifest"]
