"""Preparing a corpus: documents are shuffled, tokenized and written to disk once, for training to map.

Each document becomes the tokens of its text and one end-of-text token; no token marks its beginning. The same
texts, settings and library versions give the same corpus, byte for byte.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wlb_titan.corpus.arrow import SUMS, write_checks
from wlb_titan.corpus.chat import Conversations
from wlb_titan.corpus.corpus import Corpus
from wlb_titan.corpus.documents import Documents
from wlb_titan.corpus.existing import complete_corpus
from wlb_titan.corpus.folder import written_whole
from wlb_titan.corpus.manifest import (
    DOCUMENTS_FILE,
    FORMAT_VERSION,
    MASKED_VERSION,
    TOKENIZER_FOLDER,
    UNREADABLE_FILE,
    Manifest,
    facts_of_files,
)
from wlb_titan.corpus.replace import check_replaceable, output_folder
from wlb_titan.corpus.settings import DEFAULT_VOCAB_SIZE, PrepareSettings
from wlb_titan.corpus.sources import Source, open_source
from wlb_titan.corpus.tokenizer import CorpusTokenizer, copy_tokenizer, train_tokenizer, training_texts
from wlb_titan.corpus.writer import DocumentWriter
from wlb_titan.errors import CorpusError

CACHE_FOLDER = "cache"

Report = Callable[[str, int, int], None]
"""Told of progress: what is being done, how much of it is done, how much there is (0: not known)."""


def prepare_corpus(
    settings: PrepareSettings,
    output: str | Path,
    *,
    overwrite: bool = False,
    report: Report = lambda what, done, total: None,
) -> Corpus:
    """Make the corpus `output`, or open it if it is there already and was made with the same settings.

    `output` appears when it is complete and not before; a killed preparation leaves only a sibling folder
    that the next one clears away.

    Args:
        settings: what to make.
        output: the corpus folder; its parents are made.
        overwrite: replace a corpus that is there.
        report: called often, from this thread.

    Raises:
        CorpusError: the source or the tokenizer cannot be used, there are no documents, `output` holds
            something else or is being made by another process, or it cannot be written.
    """
    output = output_folder(output)
    if overwrite:
        check_replaceable(output)
    elif corpus := complete_corpus(settings, output):
        return corpus
    try:
        with written_whole(output, replace=overwrite) as folder:
            _write_corpus(settings, folder, report)
    except OSError as error:
        raise CorpusError(f"{output} cannot be written: {error}.") from error
    return Corpus.open(output)


def _write_corpus(settings: PrepareSettings, folder: Path, report: Report) -> None:
    report("Finding documents", 0, 0)
    cache = folder / CACHE_FOLDER
    source = open_source(settings, cache)
    order = np.random.default_rng(settings.seed).permutation(len(source)).tolist()

    report("Preparing the tokenizer", 0, 0)
    make_tokenizer(settings, training_texts(source, order), folder / TOKENIZER_FOLDER)
    tokenizer = CorpusTokenizer(folder / TOKENIZER_FOLDER)

    def enough(position: int, tokens: int) -> bool:
        if settings.max_tokens is None:
            report("Tokenizing documents", position + 1, len(order))
            return False
        report("Tokenizing", min(tokens, settings.max_tokens), settings.max_tokens)
        return tokens >= settings.max_tokens

    def progress(position: int) -> None:
        report("Tokenizing documents", position, len(order))

    part = write_part(
        documents_of(settings, source, order, tokenizer),
        folder / DOCUMENTS_FILE,
        enough,
        progress if settings.max_tokens is None else lambda position: None,
    )
    complete(settings, folder, tokenizer, [part])


@dataclass(frozen=True)
class Part:
    """What is known of one file of documents."""

    documents: int
    tokens: int
    empty: int
    unreadable: list[str]
    digest: str
    """SHA-256 of lengths, token ids and label masks."""
    learned: int = 0
    cut: int = 0
    skipped: int = 0


def make_tokenizer(settings: PrepareSettings, texts: Iterable[str], folder: Path) -> None:
    """Copy the user's tokenizer into `folder`, or train one on `texts`."""
    if settings.tokenizer is not None:
        template = Path(settings.chat_template) if settings.chat_template else None
        copy_tokenizer(Path(settings.tokenizer), folder, template)
    else:
        train_tokenizer(texts, settings.vocab_size or DEFAULT_VOCAB_SIZE, folder)


def documents_of(
    settings: PrepareSettings, source: Source, order: list[int], tokenizer: CorpusTokenizer
) -> Documents | Conversations:
    """The documents of a source as token ids, in a given order."""
    if settings.chat:
        return Conversations(source, order, tokenizer.folder, settings)
    return Documents(source, order, tokenizer)


def write_part(
    documents: Documents | Conversations,
    path: Path,
    enough: Callable[[int, int], bool] = lambda position, tokens: False,
    progress: Callable[[int], None] = lambda position: None,
) -> Part:
    """Tokenize documents into one file.

    Args:
        documents: as of `documents_of`.
        path: the file.
        enough: asked after each document, with its place in the order and the tokens so far, whether to stop.
        progress: called within a long document, with its place in the order.
    """
    documents.progress = progress
    masked = isinstance(documents, Conversations)
    with DocumentWriter(path, masked=masked) as writer:
        for position, name, tokens, spans in documents:
            writer.add(name, tokens, spans)
            if enough(position, writer.tokens):
                break
    return Part(
        documents=writer.documents,
        tokens=writer.tokens,
        empty=documents.empty,
        unreadable=[str(entry) for entry in documents.unreadable],
        digest=writer.digest().hex(),
        learned=writer.learned,
        cut=documents.cut if isinstance(documents, Conversations) else 0,
        skipped=documents.skipped if isinstance(documents, Conversations) else 0,
    )


def complete(
    settings: PrepareSettings, folder: Path, tokenizer: CorpusTokenizer, parts: Sequence[Part]
) -> None:
    """Write what a corpus has besides documents and tokenizer; the manifest last.

    Raises:
        CorpusError: there are no documents.
    """
    unreadable = [entry for part in parts for entry in part.unreadable]
    empty = sum(part.empty for part in parts)
    if not any(part.documents for part in parts):
        first = f" (the first: {unreadable[0]})" if unreadable else ""
        raise CorpusError(
            f"The source {settings.source} has no text: {empty:,} documents are empty, "
            f"{sum(part.skipped for part in parts):,} too long and {len(unreadable):,} cannot be read{first}."
        )
    if unreadable:
        lines = sorted(f"{entry}\n" for entry in unreadable)
        (folder / UNREADABLE_FILE).write_text("".join(lines), encoding="utf-8")
    shutil.rmtree(folder / CACHE_FOLDER, ignore_errors=True)
    for documents in folder.glob("*.arrow"):
        if not documents.with_suffix(SUMS).exists():
            write_checks(documents)
    files = [
        *folder.glob("*.arrow"),
        *folder.glob("*.batches"),
        *folder.glob("*.sums"),
        *(folder / TOKENIZER_FOLDER).iterdir(),
    ]
    files += [folder / UNREADABLE_FILE] if unreadable else []
    digests = b"".join(bytes.fromhex(part.digest) for part in parts)
    Manifest(
        format_version=MASKED_VERSION if settings.chat else FORMAT_VERSION,
        learned_tokens=sum(part.learned for part in parts),
        cut_documents=sum(part.cut for part in parts),
        skipped_documents=sum(part.skipped for part in parts),
        fingerprint=hashlib.sha256(tokenizer.digest + digests).hexdigest()[:16],
        documents=sum(part.documents for part in parts),
        tokens=sum(part.tokens for part in parts),
        empty_documents=empty,
        unreadable=len(unreadable),
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        end_of_text_id=tokenizer.end_of_text_id,
        tokenizer_sha256=tokenizer.digest.hex(),
        settings=settings.resolved(),
        **facts_of_files(folder, files),
    ).save(folder)
