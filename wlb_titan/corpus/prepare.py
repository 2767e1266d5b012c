"""Preparing a corpus: documents are shuffled, tokenized and written to disk once, for training to map.

Each document becomes the tokens of its text and one end-of-text token; no token marks its beginning. The same
texts, settings and library versions give the same corpus, byte for byte.
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from wlb_titan.corpus.arrow import write_checks
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
from wlb_titan.corpus.sources import open_source
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
    if settings.tokenizer is not None:
        template = Path(settings.chat_template) if settings.chat_template else None
        copy_tokenizer(Path(settings.tokenizer), folder / TOKENIZER_FOLDER, template)
    else:
        vocabulary = settings.vocab_size or DEFAULT_VOCAB_SIZE
        train_tokenizer(training_texts(source, order), vocabulary, folder / TOKENIZER_FOLDER)
    tokenizer = CorpusTokenizer(folder / TOKENIZER_FOLDER)

    documents: Documents | Conversations
    if settings.chat:
        documents = Conversations(source, order, tokenizer.folder, settings)
    else:
        documents = Documents(source, order, tokenizer)
    if settings.max_tokens is None:
        documents.progress = lambda position: report("Tokenizing documents", position, len(order))
    with DocumentWriter(folder / DOCUMENTS_FILE, masked=settings.chat) as writer:
        for position, name, tokens, spans in documents:
            writer.add(name, tokens, spans)
            if settings.max_tokens is None:
                report("Tokenizing documents", position + 1, len(order))
                continue
            report("Tokenizing", min(writer.tokens, settings.max_tokens), settings.max_tokens)
            if writer.tokens >= settings.max_tokens:
                break
    _complete(settings, folder, tokenizer, documents, writer)


def _complete(
    settings: PrepareSettings,
    folder: Path,
    tokenizer: CorpusTokenizer,
    documents: Documents | Conversations,
    writer: DocumentWriter,
) -> None:
    """Writes what a corpus has besides documents and tokenizer; the manifest last."""
    unreadable = sorted(f"{entry}\n" for entry in documents.unreadable)
    cut = documents.cut if isinstance(documents, Conversations) else 0
    skipped = documents.skipped if isinstance(documents, Conversations) else 0
    if not writer.documents:
        first = f" (the first: {documents.unreadable[0]})" if unreadable else ""
        raise CorpusError(
            f"The source {settings.source} has no text: {documents.empty:,} documents are empty, "
            f"{skipped:,} too long and {len(unreadable):,} cannot be read{first}."
        )
    if unreadable:
        (folder / UNREADABLE_FILE).write_text("".join(unreadable), encoding="utf-8")
    shutil.rmtree(folder / CACHE_FOLDER, ignore_errors=True)
    write_checks(folder / DOCUMENTS_FILE)
    files = [
        *folder.glob("*.arrow"),
        *folder.glob("*.batches"),
        *folder.glob("*.sums"),
        *(folder / TOKENIZER_FOLDER).iterdir(),
    ]
    files += [folder / UNREADABLE_FILE] if unreadable else []
    Manifest(
        format_version=MASKED_VERSION if settings.chat else FORMAT_VERSION,
        learned_tokens=writer.learned,
        cut_documents=cut,
        skipped_documents=skipped,
        fingerprint=hashlib.sha256(tokenizer.digest + writer.digest()).hexdigest()[:16],
        documents=writer.documents,
        tokens=writer.tokens,
        empty_documents=documents.empty,
        unreadable=len(unreadable),
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        end_of_text_id=tokenizer.end_of_text_id,
        tokenizer_sha256=tokenizer.digest.hex(),
        settings=settings.resolved(),
        **facts_of_files(folder, files),
    ).save(folder)
