"""Reading a prepared corpus through once, to find all damage before a run does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from wlb_titan.corpus.arrow import ArrowShard
from wlb_titan.corpus.blocks import BLOCK, again
from wlb_titan.corpus.corpus import Corpus
from wlb_titan.corpus.masks import SpanMask
from wlb_titan.corpus.vocabulary import check_ids
from wlb_titan.errors import CorpusError


def verify(folder: str | Path, report: Callable[[str, int, int], None]) -> Corpus:
    """Compares every byte of a corpus with its checksums, the tokens with its fingerprint and vocabulary.

    Args:
        folder: made by `wlb-titan prepare`, also by a version without checksums: the fingerprint is a hash of
            all tokens.
        report: told of progress: what, how much is done, how much there is.

    Raises:
        CorpusError: it is damaged; the message names files and places.
    """
    corpus = Corpus.open(folder)
    manifest = corpus.manifest
    if manifest is None:
        raise CorpusError(f"{folder} was not made by `wlb-titan prepare`, so nothing says what it should be.")
    shards = [shard for shard in corpus.shards if isinstance(shard, ArrowShard)]
    wrong = []
    for shard in shards:
        if blocks := shard.file.damaged_blocks():
            places = ", ".join(f"{block * BLOCK:,}" for block in blocks[:5])
            wrong.append(f"{shard.path.name} in {len(blocks):,} blocks of {BLOCK:,} bytes, from {places}")
    if wrong:
        raise CorpusError(f"The corpus {corpus.path} is damaged: {'; '.join(wrong)}. {again(corpus.path)}.")
    digests, done = b"", 0
    for shard, mask, first in zip(shards, corpus.masks, corpus.lengths.firsts, strict=False):
        digest = hashlib.sha256()
        for row, length in enumerate(shard.lengths(np.arange(shard.documents)).tolist()):
            tokens = shard.read(row, 0, length)
            check_ids(tokens, manifest.vocab_size, corpus, int(first) + row)
            digest.update(length.to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(tokens, dtype=np.int32).tobytes())
            if isinstance(mask, SpanMask):
                digest.update(mask.spans(row).astype(np.int32).tobytes())
            done += length
            report("Reading tokens", done, manifest.tokens)
        digests += digest.digest()
    whole = hashlib.sha256(bytes.fromhex(manifest.tokenizer_sha256) + digests).hexdigest()[:16]
    if whole != manifest.fingerprint:
        raise CorpusError(
            f"The corpus {corpus.path} is damaged: its tokens have the fingerprint {whole}, the manifest "
            f"says {manifest.fingerprint}. {again(corpus.path)}."
        )
    return corpus
