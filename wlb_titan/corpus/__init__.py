"""Documents on disk: tokenized once, by `wlb-titan prepare` or another tool, then memory-mapped.

Reading (`Corpus`) needs only numpy and pyarrow; writing (`wlb_titan.corpus.prepare`, imported separately)
also needs `datasets` and `tokenizers`.
"""

from wlb_titan.corpus.corpus import Corpus
from wlb_titan.errors import CorpusError

__all__ = ["Corpus", "CorpusError"]
