"""The tokenizer of a corpus: one that the user has, or a byte-level BPE trained on the corpus itself."""

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from wlb_titan.errors import CorpusError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
BESIDE = (TEMPLATE_FILE, "special_tokens_map.json", "generation_config.json")
"""Files that a tokenizer may have besides."""

TRAINED_END_OF_TEXT = "<|endoftext|>"


class CorpusTokenizer:
    """A tokenizer that turns text into ids, and knows the token that ends a document.

    Args:
        folder: has `tokenizer.json`, and `tokenizer_config.json` with an `eos_token`.

    Attributes:
        digest: SHA-256 of `tokenizer.json`.
        end_of_text: the token that ends a document, as text.
        vocab_size: the largest id, plus one.
    """

    def __init__(self, folder: Path) -> None:
        for name in (TOKENIZER_FILE, CONFIG_FILE):
            if not (folder / name).is_file():
                raise CorpusError(
                    f"The tokenizer folder {folder} has no {name}; it needs {TOKENIZER_FILE} and "
                    f"{CONFIG_FILE}, as they come with a model on the Hugging Face hub."
                )
        self.folder = folder
        self.digest = hashlib.sha256((folder / TOKENIZER_FILE).read_bytes()).digest()
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        except Exception as error:  # the library raises bare Exceptions
            raise CorpusError(f"{folder / TOKENIZER_FILE} is not a tokenizer: {error}") from error
        self.end_of_text = _end_of_text(folder / CONFIG_FILE)
        identifier = self._tokenizer.token_to_id(self.end_of_text)
        if identifier is None:
            raise CorpusError(
                f"The eos_token {self.end_of_text!r} of {folder / CONFIG_FILE} is not in {TOKENIZER_FILE}."
            )
        self.end_of_text_id: int = identifier
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Text that spells a special token, as source code of tokenizers does, must not become one: an
        # end-of-text token within a document would look like its end.
        self._tokenizer.encode_special_tokens = True

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of each text as an int32 array, without special tokens; uses all cores."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]


def _end_of_text(config: Path) -> str:
    try:
        token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise CorpusError(f"{config} is damaged: {error}") from error
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        raise CorpusError(
            f"{config} names no eos_token, the token that ends every document; add one that "
            f"{TOKENIZER_FILE} has."
        )
    return token


def tokenizer_files(folder: Path, template: Path | None = None) -> dict[str, Path]:
    """The files of the user's tokenizer that a corpus copies, by their names there; `template` has another
    chat template."""
    there = {name: folder / name for name in (TOKENIZER_FILE, CONFIG_FILE, *BESIDE)}
    files = {name: path for name, path in there.items() if path.is_file()}
    return files if template is None else files | {TEMPLATE_FILE: template}


def copy_tokenizer(source: Path, folder: Path, template: Path | None = None) -> None:
    """Copy `tokenizer_files` into the corpus."""
    CorpusTokenizer(source)  # complains about a tokenizer that cannot be used before anything is copied
    folder.mkdir()
    for name, path in tokenizer_files(source, template).items():
        try:
            shutil.copyfile(path, folder / name)
        except OSError as error:
            raise CorpusError(f"{path} cannot be copied into the corpus: {error.strerror}.") from error


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Train a byte-level BPE, whose decoding gives back every text exactly, and save it in `folder`.

    The result depends on the texts and `vocab_size` only. Little text gives fewer than `vocab_size` entries.
    """
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
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
