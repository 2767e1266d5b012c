"""datatrove's tokenized files: NAME.ds holds the tokens, NAME.ds.index where documents end.

The tokens are uint16 or uint32, whichever the tokenizer needs; the index is one uint64 a document, the number
of tokens up to and including it (datatrove, `pipeline/tokens/tokenizer.py`). The size of a token follows from
the size of the two files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.corpus.shards import TokenFile, map_file
from wlb_titan.errors import CorpusError

TOKEN_TYPES = {2: "<u2", 4: "<u4"}


class DatatroveShard(TokenFile):
    """NAME.ds and NAME.ds.index.

    Raises:
        CorpusError: the index is missing, or the two do not belong together.
    """

    def __init__(self, path: Path) -> None:
        index = path.with_name(path.name + ".index")
        if not index.is_file():
            raise CorpusError(
                f"{path} has no index {index.name}, so nothing tells where its documents end; write it with "
                "datatrove's save_index=True, which is the default."
            )
        self.path = path
        # Tokens are far fewer than 2^63, and signed numbers can be subtracted.
        self._ends = map_file(index, "<i8")
        self.documents = len(self._ends)
        self.tokens = int(self._ends[-1]) if self.documents else 0
        size = path.stat().st_size
        dtype = next((kind for width, kind in TOKEN_TYPES.items() if size == width * self.tokens), None)
        if dtype is None:
            raise CorpusError(
                f"{path} has {size:,} bytes, but its index speaks of {self.tokens:,} tokens of 2 or 4 bytes; "
                "copy both again."
            )
        self._values = map_file(path, dtype)

    def bounds(self, rows: Ints) -> tuple[Ints, Ints]:
        return np.where(rows > 0, self._ends[rows - 1], 0), self._ends[rows]


class DatatroveMask(DatatroveShard):
    """NAME.ds.loss, written with `save_loss_metadata`: a byte for each token of NAME.ds, 1 where learned. A
    `Shard` of these values.

    Raises:
        CorpusError: it has another number of bytes than there are tokens.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path.with_name(path.name + ".loss")
        self._values = map_file(self.path)
        if len(self._values) != self.tokens:
            raise CorpusError(
                f"{self.path} has {len(self._values):,} bytes, and {path.name} {self.tokens:,} tokens; copy "
                "both again."
            )
