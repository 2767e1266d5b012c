"""Preparing a corpus: documents are shuffled, tokenized and written to disk once, for training to map.

A document becomes the tokens of its text and an end-of-text token; no token marks its start. The same texts,
settings and library versions give the same corpus, byte for byte.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wlb_titan.corpus.chat import ChatTemplate, conversations
from wlb_titan.corpus.corpus import Corpus
from wlb_titan.corpus.folder import (
    DOCUMENTS_FILE,
    TOKENIZER_FOLDER,
    UNREADABLE_FILE,
    Manifest,
    check_replaceable,
    digest,
    output_folder,
    written_whole,
)
from wlb_titan.corpus.sources import SourceSpec, open_source
from wlb_titan.corpus.tokenizer import (
    DEFAULT_VOCAB_SIZE,
    CorpusTokenizer,
    LeftOut,
    copy_tokenizer,
    tokenized,
    tokenizer_files,
    train_tokenizer,
    training_texts,
)
from wlb_titan.corpus.writer import DocumentWriter, write_manifest
from wlb_titan.errors import CorpusError

CHAT_ONLY = ("chat", "chat_template", "template_options", "max_length", "too_long")
TOO_LONG = ("cut", "skip", "error")

Report = Callable[[str, int, int], None]  # told of an activity, its progress and total (0: unknown)


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    source: str = "python-source"  # in one of the forms of `SOURCES`
    tokenizer: str | None = None  # folder of a Hugging Face tokenizer; None trains a BPE on the texts
    vocab_size: int | None = None  # most entries of the trained tokenizer; None is `DEFAULT_VOCAB_SIZE`
    seed: int = 0  # of the order of the documents
    max_tokens: int | None = None  # stop with the document that reaches this many; None takes all
    chat: bool = False  # the records are conversations, written by the tokenizer's chat template
    # Only with `chat`: a file with another template, further values for it, the longest conversation in
    # tokens, and what is done with longer ones, one of `TOO_LONG`.
    chat_template: str | None = None
    template_options: tuple[tuple[str, Any], ...] = ()
    max_length: int | None = None
    too_long: str = "error"

    def __post_init__(self) -> None:
        kind = self.spec.kind
        if self.tokenizer is not None and self.vocab_size is not None:
            raise CorpusError("--tokenizer has a vocabulary size of its own. Leave one of the two out.")
        if not self.chat and (self.chat_template or self.template_options or self.max_length):
            raise CorpusError("A chat template, its options and a maximal length are for --chat only.")
        if self.chat and kind not in ("jsonl", "parquet", "hf"):
            raise CorpusError(f"Conversations are records of jsonl:, parquet: or hf:, not {self.source!r}.")
        if self.chat and self.tokenizer is None:
            raise CorpusError(
                "Conversations are written by the chat template of the model's tokenizer: --tokenizer DIR."
            )
        if self.too_long != "error" and self.max_length is None:
            raise CorpusError("--too-long is about conversations beyond --max-length; set that, or neither.")

    @property
    def spec(self) -> SourceSpec:
        return SourceSpec.parse(self.source, "messages" if self.chat else "text")

    @property
    def template_file(self) -> Path | None:
        return Path(self.chat_template) if self.chat_template else None

    def resolved(self) -> dict[str, Any]:
        """The settings in effect, with absolute paths; equal if they make the same corpus."""
        values = dataclasses.asdict(self)
        values["source"] = self.spec.absolute()
        values["template_options"] = dict(self.template_options)
        if self.tokenizer is None:
            values["vocab_size"] = self.vocab_size or DEFAULT_VOCAB_SIZE
        for name in ("tokenizer", "chat_template"):
            if values[name] is not None:
                values[name] = str(Path(values[name]).absolute())
        return {name: value for name, value in values.items() if self.chat or name not in CHAT_ONLY}


def prepare_corpus(
    settings: PrepareSettings,
    output: str | Path,
    *,
    overwrite: bool = False,
    report: Report = lambda what, done, total: None,
) -> Corpus:
    """Makes the corpus `output`, or opens it if it was made with the same settings.

    `output` appears only when complete; if killed, a preparation leaves a sibling folder, which the next one
    deletes. `report` is called often, from this thread.
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
    """The corpus in `output`; None if nothing is there, a CorpusError for other settings or contents."""
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
    """The files of the user's tokenizer that differ from the corpus's."""
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


def _write_corpus(settings: PrepareSettings, folder: Path, report: Report) -> None:
    report("Finding documents", 0, 0)
    cache = folder / "cache"
    source = open_source(settings.spec, cache, chat=settings.chat)
    order = np.random.default_rng(settings.seed).permutation(len(source))

    report("Preparing the tokenizer", 0, 0)
    if settings.tokenizer is not None:
        copy_tokenizer(Path(settings.tokenizer), folder / TOKENIZER_FOLDER, settings.template_file)
    else:
        vocabulary = settings.vocab_size or DEFAULT_VOCAB_SIZE
        train_tokenizer(training_texts(source, order), vocabulary, folder / TOKENIZER_FOLDER)
    tokenizer = CorpusTokenizer(folder / TOKENIZER_FOLDER)

    left_out = LeftOut()
    if settings.chat:
        template = ChatTemplate(tokenizer.folder, dict(settings.template_options))
        documents = conversations(source, order, template, left_out, settings.max_length, settings.too_long)
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
