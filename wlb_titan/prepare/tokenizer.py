"""From text to token ids: the user's tokenizer or a byte-level BPE trained on the corpus, and its documents,
made from a bounded amount of text at a time."""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, TypeVar
from unicodedata import normalize

import numpy as np
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from wlb_titan.arrays import Ints
from wlb_titan.corpus.corpus import open_tokenizer
from wlb_titan.errors import CorpusError, refusing
from wlb_titan.files import save
from wlb_titan.prepare.sources import Source

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES = (TEMPLATE_FILE, "additional_chat_templates/*.jinja")  # optional files
BESIDE = (*TEMPLATES, "special_tokens_map.json", "generation_config.json")

TRAINED_END_OF_TEXT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 4096
MIN_VOCAB_SIZE = 257  # 256 bytes and the end-of-text token

TRAINING_CHARACTERS = 8_000_000  # for the BPE: enough for some ten thousand entries, in about a second
TRAINING_DOCUMENTS = 64  # that share this text at least, however long the first ones are
PIECE_CHARACTERS = 1_000_000  # longer texts are tokenized in pieces, so that all cores work on one text
BATCH_CHARACTERS = 2_000_000  # tokenized at a time, with about 40 bytes of memory per character
CHECKED_CHARACTERS = 500_000  # of the first batch, whether they come back

Item = TypeVar("Item")


class CorpusTokenizer:
    """The tokenizer of a folder with `tokenizer.json`, and `tokenizer_config.json` with an `eos_token`, as
    transformers reads it: `named`, a `PreTrainedTokenizerFast`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.named = folder, open_tokenizer(folder)
        self.end_of_text = self.named.eos_token
        if self.end_of_text is None:
            raise CorpusError(f"{folder / CONFIG_FILE} names no eos_token, which ends every document.")
        alone = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        declared = map(str, self.named.init_kwargs.get("added_tokens_decoder", {}).values())
        if alone.token_to_id(self.end_of_text) is None and self.end_of_text not in declared:
            where = f"of {folder / CONFIG_FILE} is not in {TOKENIZER_FILE}"
            raise CorpusError(f"The eos_token {self.end_of_text!r} {where}.")
        self.end_of_text_id: int = self.named.eos_token_id
        self.vocab_size: int = max(self.named.get_vocab().values()) + 1
        self._tokenizer = self.named.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._seen = False

    def special_ids(self) -> dict[str, int]:
        """The tokens that end, begin and pad a text, by their names in a model's config.json."""
        ids = {name: getattr(self.named, name) for name in ("eos_token_id", "bos_token_id", "pad_token_id")}
        return {name: number for name, number in ids.items() if number is not None}

    def beginning(self, wanted: bool) -> np.ndarray:
        """int32 (0 or 1,), the token that begins every document; warns where others would put one."""
        token = self.special_ids().get("bos_token_id")
        if wanted and token is None:
            raise CorpusError(f"--bos: the {CONFIG_FILE} of this tokenizer names no bos_token.")
        if not wanted and self._tokenizer.encode("a").ids[:1] == [token]:
            warnings.warn(
                "This tokenizer begins texts with its bos_token, and these documents begin without it. For "
                "a model that learned with it, such as Llama 3, prepare the corpus with --bos.",
                stacklevel=2,
            )
        return np.array([token] if wanted else [], dtype=np.int32)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """int32 (n,), token ids of each text, without special tokens; uses all cores."""
        # Text that spells a special token, as source code of tokenizers does, must not become one: an
        # end-of-text token would look like the document's end.
        self._tokenizer.encode_special_tokens = True
        self._check_characters(texts)
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encodings(self, texts: list[str]) -> list[Encoding]:
        """With offsets, of texts in which a template wrote special tokens."""
        self._tokenizer.encode_special_tokens = self.named.split_special_tokens
        self._check_characters(texts)
        return list(self._tokenizer.encode_batch(texts, add_special_tokens=False))

    def _check_characters(self, texts: list[str]) -> None:
        """Warns if the first texts have characters that do not come back."""
        if self._seen:
            return
        self._seen = True
        text = "\n".join(text[: CHECKED_CHARACTERS // len(texts) + 1] for text in texts)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        given, found = (normalize("NFC", t) for t in (text, self._tokenizer.decode(ids, False)))
        lost = {c: n for c, n in (Counter(given) - Counter(found)).items() if not c.isspace()}
        if lost:
            warnings.warn(
                f"The tokenizer in {self.folder} does not give back {sum(lost.values()):,} of the first "
                f"{len(given):,} characters, such as {next(iter(lost))!r}: it leaves them out, or writes "
                "others in their place. Take one that writes every byte.",
                stacklevel=2,
            )


def tokenizer_files(folder: Path, template: str | None = None) -> dict[str, Path]:
    """The files that a corpus copies, by their names there; `template` replaces the chat template."""
    names = (TOKENIZER_FILE, CONFIG_FILE, *(name for name in BESIDE if not (template and name in TEMPLATES)))
    paths = [path for name in names for path in sorted(folder.glob(name)) if path.is_file()]
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    return files | {TEMPLATE_FILE: Path(template)} if template else files


def copy_tokenizer(source: Path, folder: Path, template: str | None = None) -> CorpusTokenizer:
    """The tokenizer in `source`, whose files `folder` gets: transformers may also look at files that a corpus
    does not need, such as config.json."""
    tokenizer = CorpusTokenizer(source)
    folder.mkdir()
    for name, path in tokenizer_files(source, template).items():
        try:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
        except OSError as error:
            raise CorpusError(f"{path} cannot be copied into the corpus: {error.strerror}.") from error
    if template:
        with refusing(lambda reason: CorpusError(f"--chat-template {template} cannot be read: {reason}.")):
            tokenizer.named.chat_template = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Trains a byte-level BPE, which decodes every text exactly; little text gives fewer entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[TRAINED_END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / TOKENIZER_FILE))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TRAINED_END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    save(folder / CONFIG_FILE, config, indent=2)


class Document(NamedTuple):
    position: int  # in the given order
    name: str
    tokens: np.ndarray  # int32 (n,)
    learned: np.ndarray | None = None  # int8 (n,), 1 where a token is learned; None learns all


@dataclass
class LeftOut:
    """Documents that were left out."""

    empty: int = 0  # documents that hold only white space
    long: int = 0  # conversations that were too long
    unlearned: int = 0  # conversations of which nothing is learned
    unreadable: list[str] = field(default_factory=list)  # names and reasons


def tokenized(
    source: Source,
    order: Ints,
    tokenizer: CorpusTokenizer,
    left_out: LeftOut,
    *,
    bos: bool = False,
    piece_characters: int = PIECE_CHARACTERS,
    batch_characters: int = BATCH_CHARACTERS,
) -> Iterator[Document]:
    """The documents of a source, by their numbers in `order`, each with an end-of-text token at the end and,
    with `bos`, the token that begins texts in front.

    Batches cross documents, so that many short ones or one of a hundred megabytes keep all cores busy.
    """
    begin = tokenizer.beginning(bos)
    end = np.array([tokenizer.end_of_text_id], dtype=np.int32)
    pieces = _pieces(source, order, left_out, piece_characters)
    batches = batched(pieces, lambda piece: len(piece[1]), batch_characters)
    arrays = (
        (position, tokens)
        for batch in batches
        for (position, _), tokens in zip(batch, tokenizer.encode([text for _, text in batch]), strict=True)
    )
    for position, parts in groupby(arrays, key=itemgetter(0)):
        tokens = np.concatenate([begin, *(tokens for _, tokens in parts), end])
        yield Document(position, source.name(order[position]), tokens)


def _pieces(source: Source, order: Ints, left_out: LeftOut, size: int) -> Iterator[tuple[int, str]]:
    for position, document in enumerate(order):
        try:
            text = source.read(document)
        except ValueError as error:
            left_out.unreadable.append(f"{source.name(document)}: {error}")
            continue
        if not text or text.isspace():
            left_out.empty += 1
        else:
            yield from ((position, piece) for piece in split_at_lines(text, size))


def batched(items: Iterable[Item], size: Callable[[Item], int], enough: int) -> Iterator[list[Item]]:
    """Runs of items whose sizes add up to `enough` or, by the last of them, more."""
    batch: list[Item] = []
    filled = 0
    for item in items:
        batch.append(item)
        filled += size(item)
        if filled >= enough:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch


def split_at_lines(text: str, size: int) -> Iterator[str]:
    """Cuts `text` into pieces of at most `size` characters, after a line's end if a piece has one.

    >>> list(split_at_lines("ab\\ncd\\nefghijkl", 6))
    ['ab\\ncd\\n', 'efghij', 'kl']
    """
    start = 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1 or start + size
        yield text[start:end]
        start = end
    yield text[start:]


def training_texts(source: Source, order: Iterable[int]) -> Iterator[str]:
    """At most `TRAINING_CHARACTERS`, from the first documents of `order`."""
    share = TRAINING_CHARACTERS // max(1, min(len(source), TRAINING_DOCUMENTS))
    missing = TRAINING_CHARACTERS
    for document in order:
        try:
            text = source.read(document)[: min(share, missing)]
        except ValueError:
            continue
        yield text
        missing -= len(text)
        if missing == 0:
            return
