"""Corpora as each tool writes them, and what is in them."""

import warnings
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from wlb_titan.corpus.corpus import Preparation
from wlb_titan.prepare.prepare import write_documents
from wlb_titan.prepare.tokenizer import Document, train_tokenizer

DOCUMENTS = [[5, 6, 7], [8], [], [9] * 40, [1, 2], [300] * 7, []]
MASKS = [[0, 1, 1], [1], [], [1, 0] * 20, [1, 1], [0] * 7, []]


def save_dataset(path: Path, **columns) -> Path:
    """DOCUMENTS as `datasets` does, with these columns beside their tokens."""
    import datasets

    datasets.Dataset.from_dict({"input_ids": DOCUMENTS, **columns}).save_to_disk(path)
    return path


def write_prepared(folder: Path, documents, masks=None) -> Path:
    """As `wlb-titan prepare` does, with a tokenizer of bytes."""
    folder.mkdir(parents=True)
    train_tokenizer(["a"], 257, folder / "tokenizer")
    rows = []
    for number, tokens in enumerate(documents):
        learned = None if masks is None else np.array(masks[number], np.int8)
        rows.append(Document(number, f"document {number}", np.array(tokens, np.int32), learned))
    counts = write_documents(folder, rows, masked=masks is not None)
    Preparation(**counts, vocab_size=1000, end_of_text="<|fin…|>", settings={}).save(folder)
    return folder


def write_megatron(prefix: Path, documents, dtype=np.int32, *, sequences=False, ends=True) -> Path:
    """PREFIX.bin and PREFIX.idx; each document is a sequence, or with `sequences` a list of them."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of extensions that are not installed
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    file = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        for sequence in document if sequences else [document]:
            file.add_item(torch.tensor(sequence, dtype=torch.int64))
        if ends:
            file.end_document()
    file.finalize(f"{prefix}.idx")
    return prefix


def write_datatrove(path: Path, documents, token_size=2, masks=None) -> Path:
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    how = {"token_size": token_size, "save_loss_metadata": masks is not None}
    file = TokenizedFile(str(path.parent), path.name, **how)
    for number, document in enumerate(documents):
        file.write(document, masks and masks[number])
    file.close()
    return path


def content(corpus) -> list[list[int]]:
    return [corpus.tokens(row).tolist() for row in range(len(corpus))]


def decode(tokenizer: Path, tokens) -> str:
    """The text of token ids, special tokens included, by the tokenizer in a folder."""
    own = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return own.decode(list(tokens), skip_special_tokens=False)
