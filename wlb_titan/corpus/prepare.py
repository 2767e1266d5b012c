"""Preparing a corpus: documents are shuffled, tokenized and written to disk once, for training to map.

Each document becomes the tokens of its text and one end-of-text token; no token marks its beginning. The same
texts, settings and library versions give the same corpus, byte for byte.
"""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from wlb_titan.corpus.chat import conversations
from wlb_titan.corpus.corpus import Corpus
from wlb_titan.corpus.folder import check_replaceable, output_folder, written_whole
from wlb_titan.corpus.manifest import DOCUMENTS_FILE, TOKENIZER_FOLDER, UNREADABLE_FILE, Manifest, digest
from wlb_titan.corpus.settings import DEFAULT_VOCAB_SIZE, PrepareSettings
from wlb_titan.corpus.sources import open_source
from wlb_titan.corpus.texts import LeftOut, tokenized, training_texts
from wlb_titan.corpus.tokenizer import CorpusTokenizer, copy_tokenizer, tokenizer_files, train_tokenizer
from wlb_titan.corpus.writer import DocumentWriter, write_manifest
from wlb_titan.errors import CorpusError

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


def complete_corpus(settings: PrepareSettings, output: Path) -> Corpus | None:
    """The corpus that `output` holds, or None where nothing lies in the way of making one; a CorpusError for
    one of other settings, and for anything else."""
    check_replaceable(output)
    if not output.exists() or not any(output.iterdir()):
        return None
    corpus = Corpus.open(output)
    assert corpus.manifest is not None
    wanted, found = settings.resolved(), corpus.manifest.settings
    differences = [
        f"{name} is {found.get(name)!r} there, and {wanted.get(name)!r} was asked for"
        for name in {**wanted, **found}
        if found.get(name) != wanted.get(name)
    ]
    differences += _changed_tokenizer(settings, corpus.manifest)
    if differences:
        raise CorpusError(
            f"{output} holds a corpus that was made with other settings: {'; '.join(differences)}. "
            "Add --overwrite to replace it, or name another folder."
        )
    return corpus


def _changed_tokenizer(settings: PrepareSettings, manifest: Manifest) -> list[str]:
    """Names the files of the user's tokenizer, if it is there, that are not those of the corpus."""
    if settings.tokenizer is None or not Path(settings.tokenizer).is_dir():
        return []
    files = tokenizer_files(Path(settings.tokenizer), settings.template_file)
    now = {f"{TOKENIZER_FOLDER}/{name}": digest(path) for name, path in files.items() if path.is_file()}
    then = {name for name in manifest.digests if name.startswith(f"{TOKENIZER_FOLDER}/")}
    return [
        f"{name} was another file then"
        for name in sorted(now.keys() | then)
        if now.get(name) != manifest.digests.get(name)
    ]


def shuffled(documents: int, seed: int) -> array[int]:
    """The numbers of documents in a random order: 8 bytes each, as there may be hundreds of millions."""
    return array("q", np.random.default_rng(seed).permutation(documents).astype(np.int64).tobytes())


def _write_corpus(settings: PrepareSettings, folder: Path, report: Report) -> None:
    report("Finding documents", 0, 0)
    cache = folder / "cache"
    source = open_source(settings, cache)
    order = shuffled(len(source), settings.seed)

    report("Preparing the tokenizer", 0, 0)
    if settings.tokenizer is not None:
        copy_tokenizer(Path(settings.tokenizer), folder / TOKENIZER_FOLDER, settings.template_file)
    else:
        vocabulary = settings.vocab_size or DEFAULT_VOCAB_SIZE
        train_tokenizer(training_texts(source, order), vocabulary, folder / TOKENIZER_FOLDER)
    tokenizer = CorpusTokenizer(folder / TOKENIZER_FOLDER)

    left_out = LeftOut()
    if settings.chat:
        documents = conversations(source, order, tokenizer.folder, settings, left_out)
    else:
        documents = tokenized(source, order, tokenizer, left_out)
    with DocumentWriter(folder / DOCUMENTS_FILE, masked=settings.chat) as writer:
        for position, name, tokens, spans in documents:
            writer.add(name, tokens, spans)
            if settings.max_tokens is None:
                report("Tokenizing documents", position + 1, len(order))
                continue
            report("Tokenizing", min(writer.tokens, settings.max_tokens), settings.max_tokens)
            if writer.tokens >= settings.max_tokens:
                break
    unreadable = sorted(left_out.unreadable)
    if not writer.documents:
        first = f" (the first: {unreadable[0]})" if unreadable else ""
        raise CorpusError(
            f"The source {settings.source} has no text: {left_out.empty:,} documents are empty, "
            f"{left_out.skipped:,} too long and {len(unreadable):,} cannot be read{first}."
        )
    if unreadable:
        lines = "".join(f"{entry}\n" for entry in unreadable)
        (folder / UNREADABLE_FILE).write_text(lines, encoding="utf-8")
    shutil.rmtree(cache, ignore_errors=True)
    write_manifest(
        folder,
        writer,
        tokenizer,
        settings.resolved(),
        cut_documents=left_out.cut,
        skipped_documents=left_out.skipped,
        empty_documents=left_out.empty,
        unreadable=len(unreadable),
    )
