"""Preparing a corpus: documents are shuffled, tokenized and written to disk once, for training to map.

The same texts, settings and library versions give the same corpus, byte for byte.

A corpus is written inside a sibling, `.NAME.partial`, and moved to its place at the end. The writer holds a
lock in there, which the kernel drops when the process dies: so what a killed process left can be told from a
folder in use, and is deleted by the next one.
"""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout

from wlb_titan.arrays import Ints
from wlb_titan.corpus.corpus import (
    PREPARATION_FILE,
    TOKENIZER_FOLDER,
    UNREADABLE_FILE,
    Corpus,
    Preparation,
    partial_folder,
)
from wlb_titan.corpus.formats import MASK, SOURCE, TOKENS, fingerprint_of
from wlb_titan.errors import CorpusError
from wlb_titan.files import save
from wlb_titan.prepare.chat import ChatTemplate, conversations
from wlb_titan.prepare.sources import SourceSpec, open_source
from wlb_titan.prepare.tokenizer import (
    DEFAULT_VOCAB_SIZE,
    MIN_VOCAB_SIZE,
    TRAINED_END_OF_TEXT,
    CorpusTokenizer,
    Document,
    LeftOut,
    batched,
    copy_tokenizer,
    tokenized,
    tokenizer_files,
    train_tokenizer,
    training_texts,
)
from wlb_titan.progress import Progress, silent


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    source: str = "python-source"  # in one of the forms of `SOURCES`
    tokenizer: str | None = None  # folder of a Hugging Face tokenizer; None trains a BPE on the texts
    vocab_size: int | None = None  # most entries of the trained tokenizer; None is `DEFAULT_VOCAB_SIZE`
    seed: int = 0  # of the order of the documents
    bos: bool = False  # documents begin with the tokenizer's bos_token
    max_tokens: int | None = None  # stop with the document that reaches this many; None takes all
    chat: bool = False  # the records are conversations, written by the tokenizer's chat template
    chat_template: str | None = None  # with `chat`: a file with another template
    max_length: int | None = None  # with `chat`: conversations of more tokens are left out
    today: str | None = None  # with `chat`: YYYY-MM-DD, for templates that write the date

    def __post_init__(self) -> None:
        kind = self.spec.kind
        if self.tokenizer is not None and self.vocab_size is not None:
            raise CorpusError(
                "--tokenizer has its own vocabulary size; leave out --vocab-size, or --tokenizer."
            )
        if not self.chat and (self.chat_template or self.max_length or self.today):
            raise CorpusError("--chat-template, --max-length and --today are for --chat only.")
        if self.bos and (self.chat or self.tokenizer is None):
            raise CorpusError("--bos is for the text of a --tokenizer; chat templates write their own.")
        if self.chat and kind not in ("jsonl", "parquet", "hf"):
            raise CorpusError(f"Conversations are records of jsonl:, parquet: or hf:, not {self.source!r}.")
        if self.chat and self.tokenizer is None:
            raise CorpusError(
                "Conversations are written by the chat template of the model's tokenizer: --tokenizer DIR."
            )

    @property
    def spec(self) -> SourceSpec:
        return SourceSpec.parse(self.source, "messages" if self.chat else "text")


def prepare_corpus(settings: PrepareSettings, output: str | Path, *, report: Progress = silent) -> Corpus:
    """Makes the corpus `output`, or opens it if it was made with the same settings.

    `output` appears only when complete, and nothing that was there is replaced. `report` is called often,
    from this thread.
    """
    try:
        output = Path(output).resolve()  # a link may stand for the corpus
        if corpus := complete_corpus(settings, output):
            return corpus
        spec = settings.spec
        if spec.kind == "text" and Path(spec.location).resolve() in (output, *output.parents):
            raise CorpusError(
                f"{output} is inside its own source and would become a part of it; name another folder."
            )
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
            f"{output} already exists and is not a corpus made by this version of `wlb-titan prepare`. Name "
            "another folder, or delete it if it is a corpus of an earlier version."
        )
    corpus = Corpus.open(output)
    assert corpus.preparation is not None
    existing = dataclasses.asdict(PrepareSettings()) | corpus.preparation.settings
    differences = [
        f"{name} is {existing[name]!r} there, and {value!r} was asked for"
        for name, value in dataclasses.asdict(settings).items()
        if existing[name] != value
    ]
    differences += _changed_tokenizer(settings, output / TOKENIZER_FOLDER)
    if differences:
        raise CorpusError(
            f"{output} contains a corpus that was made with other settings: {'; '.join(differences)}. Delete "
            "it first, or name another folder."
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


def _write_corpus(settings: PrepareSettings, folder: Path, report: Progress) -> None:
    report("Finding documents", 0, 0)
    cache = folder / "cache"
    source = open_source(settings.spec, cache, chat=settings.chat)
    order = np.random.default_rng(settings.seed).permutation(len(source))

    report("Preparing the tokenizer", 0, 0)
    place = folder / TOKENIZER_FOLDER
    if settings.tokenizer is not None:
        tokenizer = copy_tokenizer(Path(settings.tokenizer), place, settings.chat_template)
    else:
        train_tokenizer(training_texts(source, order), settings.vocab_size or DEFAULT_VOCAB_SIZE, place)
        tokenizer = CorpusTokenizer(place)

    left_out = LeftOut()
    if settings.chat:
        template = ChatTemplate(tokenizer, settings.today)
        documents = conversations(source, order, template, left_out, settings.max_length)
    else:
        documents = tokenized(source, order, tokenizer, left_out, bos=settings.bos)
    taken = _taken(documents, len(order), settings.max_tokens, report)
    written = write_documents(folder, taken, masked=settings.chat)
    if settings.chat and template.endless:
        warnings.warn(
            f"{template.endless:,} of {template.parts:,} learned parts end without a special token, by which "
            "a model could stop. Put {% generation %} and {% endgeneration %} around what the assistant says "
            "and the token that ends it, in a copy of the template (--chat-template FILE).",
            stacklevel=2,
        )
    unreadable = sorted(left_out.unreadable)
    if not written["documents"]:
        first = f" (the first: {unreadable[0]})" if unreadable else ""
        marks = "the template's {% generation %} encloses nothing that the assistant says"
        unlearned = f" Of {left_out.unlearned:,} conversations nothing is learned: {marks}, or they say so."
        raise CorpusError(
            f"The source {settings.source} has no text: {left_out.empty:,} documents are empty, "
            f"{left_out.long:,} too long and {len(unreadable):,} cannot be read{first}."
            f"{unlearned if left_out.unlearned else ''}"
        )
    if unreadable:
        save(folder / UNREADABLE_FILE, "".join(f"{entry}\n" for entry in unreadable))
    shutil.rmtree(cache, ignore_errors=True)
    Preparation(
        **written,
        empty_documents=left_out.empty,
        long_documents=left_out.long,
        unlearned_documents=left_out.unlearned,
        unreadable=len(unreadable),
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        settings=dataclasses.asdict(settings),
    ).save(folder)


def _taken(
    documents: Iterable[Document], count: int, most: int | None, report: Progress
) -> Iterator[Document]:
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


DOCUMENTS_FILE = "data-00000-of-00001.arrow"  # as `datasets` calls a file that is alone
BATCH_TOKENS = 1 << 20  # of a record batch, which has one document if that has more

SIGMA = 1.5  # of the logarithm of a synthetic length
SHAPE = f"log-normal with a median of a 32nd of the context window and sigma {SIGMA:g}, cut at the window"
"""The distribution of `long_tailed_lengths`, for reports."""


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `path` at the end, or is deleted if anything fails."""
    partial = partial_folder(path)
    partial.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(FileLock(partial / "lock", timeout=0))
        except Timeout:
            raise CorpusError(
                f"Another process is preparing {path} at this moment; wait for it, or name another folder."
            ) from None
        except (OSError, NotImplementedError):
            pass  # a file system without locks
        folder = partial / "corpus"
        shutil.rmtree(folder, ignore_errors=True)  # of a killed process
        folder.mkdir()
        try:
            yield folder
            folder.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def write_documents(folder: Path, documents: Iterable[Document], *, masked: bool = False) -> dict[str, Any]:
    """Writes documents, which have masks or do not, so that `datasets.load_from_disk` opens the folder; gives
    the fields of `Preparation` that count them."""
    import datasets  # takes a second
    from datasets.arrow_writer import ArrowWriter

    columns: dict[str, Any] = {TOKENS: datasets.List(datasets.Value("int32"))}
    if masked:
        columns[MASK] = datasets.List(datasets.Value("int8"))
    features = datasets.Features(columns | {SOURCE: datasets.Value("string")})
    count = tokens = learned = 0
    file = folder / DOCUMENTS_FILE
    # Batches are bounded by their tokens, so not by their rows.
    with ArrowWriter(features=features, path=str(file), writer_batch_size=BATCH_TOKENS) as writer:
        for batch in batched(documents, lambda document: len(document.tokens), BATCH_TOKENS):
            values = {
                TOKENS: [document.tokens for document in batch],
                MASK: [document.learned for document in batch],
                SOURCE: [document.name for document in batch],
            }
            arrays = [pa.array(values[field.name], field.type) for field in features.arrow_schema]
            writer.write_table(pa.table(arrays, schema=features.arrow_schema))
            count += len(batch)
            tokens += sum(len(document.tokens) for document in batch)
            learned += sum(int(document.learned.sum()) for document in batch if document.learned is not None)
        writer.finalize()
    datasets.DatasetInfo(features=features).write_to_directory(str(folder))
    state: dict[str, Any] = {
        "_data_files": [{"filename": DOCUMENTS_FILE}],
        "_fingerprint": fingerprint_of([file]),
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    save(folder / "state.json", state, indent=2)
    return {"documents": count, "tokens": tokens, "learned_tokens": learned if masked else None}


def long_tailed_lengths(tokens: int, longest: int, seed: int = 0) -> Ints:
    """int64 (documents,), lengths from `SHAPE` that add up to at least `tokens`. About one in a hundred is
    `longest`, and these have about a tenth of the tokens."""
    draw = np.random.default_rng(seed)
    median = max(longest // 32, 1)
    lengths = np.empty(0, dtype=np.int64)
    while lengths.sum() < tokens:
        more = draw.lognormal(np.log(median), SIGMA, size=max(256, tokens // (2 * median)))
        lengths = np.concatenate([lengths, np.clip(more, 1, longest).astype(np.int64)])
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]


def write_synthetic_corpus(path: Path, lengths: Ints) -> Corpus:
    """A new corpus of documents of these lengths, int64 (documents,), whose tokens are all 0: for plans where
    the real one is not at hand."""
    zeros = np.zeros(int(lengths.max()), dtype=np.int32)
    documents = (
        Document(number, f"synthetic {number}", zeros[:length])
        for number, length in enumerate(lengths.tolist())
    )
    with written_whole(path) as folder:
        train_tokenizer(["a"], MIN_VOCAB_SIZE, folder / TOKENIZER_FOLDER)
        Preparation(
            **write_documents(folder, documents),
            vocab_size=MIN_VOCAB_SIZE,
            end_of_text=TRAINED_END_OF_TEXT,
            settings={"source": "synthetic"},
        ).save(folder)
    return Corpus.open(path)
