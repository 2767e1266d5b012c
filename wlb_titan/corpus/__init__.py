"""Documents on disk: tokenized once, by `wlb-titan prepare` or another tool, then memory-mapped.

Nothing but numpy and pyarrow is needed. `corpus.py` is what others use, `formats.py` knows the files of each
tool and their label masks, `shards.py` reads their columns. `wlb_titan.prepare` makes what is read here.
"""

from wlb_titan.corpus.corpus import Corpus
from wlb_titan.errors import CorpusError

__all__ = ["Corpus", "CorpusError"]
