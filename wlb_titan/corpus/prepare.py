"""Preparing a corpus: documents are shuffled, tokenized and written to disk once, for training to map.

Each document becomes the tokens of its text and one end-of-text token; no token marks its beginning. The same
texts, settings and library versions give the same corpus, byte for byte.
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from wlb_titan.corpus.corpus import Corpus
from wlb_titan.corpus.documents import Documents
from wlb_titan.corpus.errors import CorpusError
from wlb_titan.corpus.existing import check_replaceable, complete_corpus
from wlb_titan.corpus.folder import LOCK_FILE, written_whole
from wlb_titan.corpus.manifest import DOCUMENTS_FILE, TOKENIZER_FOLDER, UNREADABLE_FILE, Manifest
from wlb_titan.corpus.settings import DEFAULT_VOCAB_SIZE, PrepareSettings
from wlb_titan.corpus.sources import open_source
from wlb_titan.corpus.tokenizer import CorpusTokenizer, copy_tokenizer, train_tokenizer, training_texts
from wlb_titan.corpus.writer import DocumentWriter

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
    output = Path(output).absolute()
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
    cache = folder / "cache"
    source = open_source(settings, cache)
    order = np.random.default_rng(settings.seed).permutation(len(source)).tolist()

    report("Preparing the tokenizer", 0, 0)
    if settings.tokenizer is not None:
        copy_tokenizer(Path(settings.tokenizer), folder / TOKENIZER_FOLDER)
    else:
        texts = training_texts(source, order)
        train_tokenizer(texts, settings.vocab_size or DEFAULT_VOCAB_SIZE, folder / TOKENIZER_FOLDER)
    tokenizer = CorpusTokenizer(folder / TOKENIZER_FOLDER)

    documents = Documents(source, order, tokenizer)
    with DocumentWriter(folder / DOCUMENTS_FILE) as writer:
        for position, name, tokens in documents:
            writer.add(name, tokens)
            if settings.max_tokens is None:
                report("Tokenizing documents", position + 1, len(order))
            else:
                report("Tokenizing", min(writer.tokens, settings.max_tokens), settings.max_tokens)
                if writer.tokens >= settings.max_tokens:
                    break
    if writer.documents == 0:
        first = f" (the first: {documents.unreadable[0]})" if documents.unreadable else ""
        raise CorpusError(
            f"The source {settings.source} has no text: {documents.empty:,} documents are empty and "
            f"{len(documents.unreadable):,} cannot be read{first}."
        )

    if documents.unreadable:
        lines = sorted(f"{entry}\n" for entry in documents.unreadable)
        (folder / UNREADABLE_FILE).write_text("".join(lines), encoding="utf-8")
    shutil.rmtree(cache, ignore_errors=True)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE)
    Manifest(
        fingerprint=hashlib.sha256(tokenizer.digest + writer.digest()).hexdigest()[:16],
        documents=writer.documents,
        tokens=writer.tokens,
        empty_documents=documents.empty,
        unreadable=len(documents.unreadable),
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        end_of_text_id=tokenizer.end_of_text_id,
        tokenizer_sha256=tokenizer.digest.hex(),
        settings=settings.resolved(),
        files={path.relative_to(folder).as_posix(): path.stat().st_size for path in files},
    ).save(folder)
