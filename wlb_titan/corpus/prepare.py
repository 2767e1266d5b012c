"""Preparing a corpus: documents are shuffled, tokenized and written to disk once, for training to map.

A document becomes the tokens of its text and an end-of-text token; no token marks its start. The same texts,
settings and library versions give the same corpus, byte for byte.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wlb_titan.corpus.chat import ChatTemplate, conversations
from wlb_titan.corpus.corpus import PREPARATION_FILE, TOKENIZER_FOLDER, UNREADABLE_FILE, Corpus, Preparation
from wlb_titan.corpus.sources import SourceSpec, open_source
from wlb_titan.corpus.tokenizer import (
    DEFAULT_VOCAB_SIZE,
    CorpusTokenizer,
    Document,
    LeftOut,
    copy_tokenizer,
    tokenized,
    tokenizer_files,
    train_tokenizer,
    training_texts,
)
from wlb_titan.corpus.writer import write_documents, written_whole
from wlb_titan.errors import CorpusError

Report = Callable[[str, int, int], None]  # told of an activity, its progress and total (0: unknown)


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    source: str = "python-source"  # in one of the forms of `SOURCES`
    tokenizer: str | None = None  # folder of a Hugging Face tokenizer; None trains a BPE on the texts
    vocab_size: int | None = None  # most entries of the trained tokenizer; None is `DEFAULT_VOCAB_SIZE`
    seed: int = 0  # of the order of the documents
    max_tokens: int | None = None  # stop with the document that reaches this many; None takes all
    chat: bool = False  # the records are conversations, written by the tokenizer's chat template
    chat_template: str | None = None  # with `chat`: a file with another template
    max_length: int | None = None  # with `chat`: conversations of more tokens are left out

    def __post_init__(self) -> None:
        kind = self.spec.kind
        if self.tokenizer is not None and self.vocab_size is not None:
            raise CorpusError("--tokenizer has a vocabulary size of its own. Leave one of the two out.")
        if not self.chat and (self.chat_template or self.max_length):
            raise CorpusError("A chat template and a maximal length are for --chat only.")
        if self.chat and kind not in ("jsonl", "parquet", "hf"):
            raise CorpusError(f"Conversations are records of jsonl:, parquet: or hf:, not {self.source!r}.")
        if self.chat and self.tokenizer is None:
            raise CorpusError(
                "Conversations are written by the chat template of the model's tokenizer: --tokenizer DIR."
            )

    @property
    def spec(self) -> SourceSpec:
        return SourceSpec.parse(self.source, "messages" if self.chat else "text")


def prepare_corpus(
    settings: PrepareSettings, output: str | Path, *, report: Report = lambda what, done, total: None
) -> Corpus:
    """Makes the corpus `output`, or opens it if it was made with the same settings.

    `output` appears only when complete, and nothing that was there is replaced. `report` is called often,
    from this thread.
    """
    try:
        output = Path(output).resolve()  # a link may stand for the corpus
        if corpus := complete_corpus(settings, output):
            return corpus
        with written_whole(output) as folder:
            _write_corpus(settings, folder, report)
    except OSError as error:
        raise CorpusError(f"{output} cannot be written: {error}.") from error
    return Corpus.open(output)


def complete_corpus(settings: PrepareSettings, output: Path) -> Corpus | None:
    """The corpus in `output`; None if nothing is there, a CorpusError for other settings or contents."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not (output / PREPARATION_FILE).is_file():
        raise CorpusError(
            f"{output} is there already, and no corpus of this `wlb-titan prepare`. Name another folder, "
            "or delete it if it is a corpus of an earlier version."
        )
    corpus = Corpus.open(output)
    assert corpus.preparation is not None
    wanted, found = dataclasses.asdict(settings), corpus.preparation.settings
    differences = [
        f"{name} is {found.get(name)!r} there, and {value!r} was asked for"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
    differences += _changed_tokenizer(settings, output / TOKENIZER_FOLDER)
    if differences:
        raise CorpusError(
            f"{output} holds a corpus that was made with other settings: {'; '.join(differences)}. "
            "Delete it first, or name another folder."
        )
    return corpus


def _changed_tokenizer(settings: PrepareSettings, copies: Path) -> list[str]:
    """The files of the user's tokenizer that differ from the corpus's."""
    if settings.tokenizer is None:
        return []
    files = tokenizer_files(Path(settings.tokenizer), settings.chat_template)
    return [
        f"{path} was another file then"
        for name, path in files.items()
        if not ((copies / name).is_file() and path.read_bytes() == (copies / name).read_bytes())
    ]


def _write_corpus(settings: PrepareSettings, folder: Path, report: Report) -> None:
    report("Finding documents", 0, 0)
    cache = folder / "cache"
    source = open_source(settings.spec, cache, chat=settings.chat)
    order = np.random.default_rng(settings.seed).permutation(len(source))

    report("Preparing the tokenizer", 0, 0)
    if settings.tokenizer is not None:
        copy_tokenizer(Path(settings.tokenizer), folder / TOKENIZER_FOLDER, settings.chat_template)
    else:
        vocabulary = settings.vocab_size or DEFAULT_VOCAB_SIZE
        train_tokenizer(training_texts(source, order), vocabulary, folder / TOKENIZER_FOLDER)
    tokenizer = CorpusTokenizer(folder / TOKENIZER_FOLDER)

    left_out = LeftOut()
    if settings.chat:
        template = ChatTemplate(tokenizer.folder)
        documents = conversations(source, order, template, left_out, settings.max_length)
    else:
        documents = tokenized(source, order, tokenizer, left_out)
    taken = _taken(documents, len(order), settings.max_tokens, report)
    written = write_documents(folder, taken, masked=settings.chat)
    unreadable = sorted(left_out.unreadable)
    if not written.documents:
        first = f" (the first: {unreadable[0]})" if unreadable else ""
        marks = "the template's {% generation %} stands around nothing that the assistant says"
        unlearned = f" Of {left_out.unlearned:,} conversations nothing is learned: {marks}, or they say so."
        raise CorpusError(
            f"The source {settings.source} has no text: {left_out.empty:,} documents are empty, "
            f"{left_out.long:,} too long and {len(unreadable):,} cannot be read{first}."
            f"{unlearned if left_out.unlearned else ''}"
        )
    if unreadable:
        lines = "".join(f"{entry}\n" for entry in unreadable)
        (folder / UNREADABLE_FILE).write_text(lines, encoding="utf-8")
    shutil.rmtree(cache, ignore_errors=True)
    Preparation(
        **written._asdict(),
        empty_documents=left_out.empty,
        long_documents=left_out.long,
        unlearned_documents=left_out.unlearned,
        unreadable=len(unreadable),
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        settings=dataclasses.asdict(settings),
    ).save(folder)


def _taken(documents: Iterable[Document], count: int, most: int | None, report: Report) -> Iterator[Document]:
    """The documents up to the one that reaches `most` tokens."""
    tokens = 0
    for document in documents:
        yield document
        tokens += len(document.tokens)
        if most is None:
            report("Tokenizing documents", document.position + 1, count)
            continue
        report("Tokenizing", min(tokens, most), most)
        if tokens >= most:
            return
