"""A corpus without text: documents of given lengths, for plans where the real corpus is not at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.corpus.corpus import Corpus
from wlb_titan.corpus.folder import written_whole
from wlb_titan.corpus.manifest import DOCUMENTS_FILE, TOKENIZER_FOLDER
from wlb_titan.corpus.settings import MIN_VOCAB_SIZE
from wlb_titan.corpus.tokenizer import CorpusTokenizer, train_tokenizer
from wlb_titan.corpus.writer import DocumentWriter, write_manifest

SIGMA = 1.5
"""Of the logarithm of a length."""

SHAPE = f"log-normal with a median of a 32nd of the context window and sigma {SIGMA:g}, cut at the window"
"""What `long_tailed_lengths` draws from, for reports."""


def long_tailed_lengths(tokens: int, longest: int, seed: int = 0) -> Ints:
    """Lengths with a long tail: log-normal, with a median of a 32nd of the longest and sigma 1.5.

    About one document in a hundred is as long as the longest, and these have about a tenth of the tokens.

    Args:
        tokens: how many there are to be together, at least.
        longest: length at which they are cut off.

    Returns:
        int64 (documents,).
    """
    draw = np.random.default_rng(seed)
    median = max(longest // 32, 1)
    lengths = np.empty(0, dtype=np.int64)
    while lengths.sum() < tokens:
        more = draw.lognormal(np.log(median), SIGMA, size=max(256, tokens // (2 * median)))
        lengths = np.concatenate([lengths, np.clip(more, 1, longest).astype(np.int64)])
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]


def write_synthetic_corpus(path: Path, lengths: Ints) -> Corpus:
    """Writes documents of these lengths, whose tokens are all 0, and opens them as a corpus.

    Args:
        path: the corpus folder, which must not exist.
        lengths: int64 (documents,), tokens.
    """
    with written_whole(path, replace=False) as folder:
        train_tokenizer(["a"], MIN_VOCAB_SIZE, folder / TOKENIZER_FOLDER)
        tokenizer = CorpusTokenizer(folder / TOKENIZER_FOLDER)
        zeros = np.zeros(int(lengths.max()), dtype=np.int32)
        with DocumentWriter(folder / DOCUMENTS_FILE) as writer:
            for number, length in enumerate(lengths.tolist()):
                writer.add(f"synthetic {number}", zeros[:length])
        write_manifest(folder, writer, tokenizer, {"source": "synthetic"}, empty_documents=0, unreadable=0)
    return Corpus.open(path)
