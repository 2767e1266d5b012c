"""Token ids against the vocabulary.

A model that meets an id beyond its embedding table fails far from the cause, on a GPU without a message.
"""

from __future__ import annotations

import numpy as np

from wlb_titan.corpus.corpus import Corpus
from wlb_titan.corpus.shards import Tokens
from wlb_titan.errors import CorpusError

SAMPLE_TOKENS = 1 << 24
SPOTS = 256


def check_ids(tokens: Tokens, vocabulary: int, corpus: Corpus, row: int) -> None:
    """Make sure that the tokens of document `row` are ids below `vocabulary`.

    Raises:
        CorpusError: one is not; the message names document and id.
    """
    if not len(tokens):
        return
    for found in (int(tokens.max()), int(tokens.min())):
        if not 0 <= found < vocabulary:
            raise CorpusError(
                f"Document {row} ({corpus.source(row)}) of {corpus} has the token id {found}, but the "
                f"vocabulary has {vocabulary:,} entries. The corpus is damaged, or was made with another "
                "tokenizer."
            )


def check_sample(corpus: Corpus, vocabulary: int) -> None:
    """`check_ids` for all documents of a corpus up to 16 M tokens, and for so many tokens of a larger one.

    Those are spread over it in 256 runs of documents.

    Raises:
        CorpusError: as `check_ids`, or a label mask has values that no mask has.
    """
    spots = np.linspace(0, len(corpus), SPOTS, endpoint=False).astype(np.int64)
    for start, stop in zip(spots, [*spots[1:], len(corpus)], strict=True):
        left = SAMPLE_TOKENS // SPOTS if corpus.lengths.sum() > SAMPLE_TOKENS else SAMPLE_TOKENS
        for row in range(int(start), int(stop)):
            tokens = corpus.tokens(row)[:left]
            check_ids(tokens, vocabulary, corpus, row)
            corpus.learned(row, 0, len(tokens))  # complains about a mask with other values
            left -= len(tokens)
            if left <= 0:
                break
