"""Corpora that other tools wrote, opened where they lie: Megatron's, datatrove's, Hugging Face's.

| what lies at the path | it is |
| --- | --- |
| a folder with NAME.ds files, or one such file | datatrove's tokenized files |
| a folder with NAME.bin and NAME.idx files, or one such pair (with either ending, or without) | Megatron's |
| a folder with state.json and dataset_info.json | a dataset of Hugging Face's, by `save_to_disk` |

The files of a folder are read in the order of their names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wlb_titan.corpus.arrow import ArrowShard, columns_of
from wlb_titan.corpus.datatrove import DatatroveMask, DatatroveShard
from wlb_titan.corpus.masks import Mask, TokenMask, chosen_column
from wlb_titan.corpus.megatron import MegatronShard
from wlb_titan.corpus.shards import Shard
from wlb_titan.errors import CorpusError

SAMPLES = 16  # places of a file that its fingerprint reads
SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Foreign:
    """What lies at a path.

    Attributes:
        shards: files of documents.
        masks: label mask of each shard, as a `Corpus` has them.
        files: all that is read.
        read_as: what of the files is tokens and what mask, for the fingerprint.
    """

    shards: Sequence[Shard]
    masks: Sequence[Mask | None]
    files: Sequence[Path]
    read_as: str = ""


def open_foreign(path: Path, column: str, mask: str) -> Foreign | None:
    """The corpus at `path`; None where nothing there is known.

    Args:
        path: absolute.
        column: name of the column with the token ids, in Hugging Face's datasets.
        mask: what says which tokens are learned: of Hugging Face's datasets a column, of Megatron's the
            prefix of a second pair of files (or a folder of such pairs) with 0 or 1 for each token; "auto",
            whatever there is; "none", nothing.

    Raises:
        CorpusError: the files are damaged, or do not hold documents of token ids, or masks that do not fit.
    """
    if (path / "dataset_dict.json").is_file():
        named = ", ".join(str(path / split) for split in _read_json(path / "dataset_dict.json", "splits"))
        raise CorpusError(
            f"{path} holds a dataset of several splits; name the folder of one of them: {named}."
        )
    if (path / "state.json").is_file():
        return _dataset(path, column, mask)
    if path.suffix == ".ds" and path.is_file():
        return _tokenized([path], mask)
    if prefixes := _prefixes(path):
        return _indexed(prefixes, mask)
    if path.is_dir() and (tokenized := sorted(path.glob("*.ds"))):
        return _tokenized(tokenized, mask)
    return None


def _dataset(folder: Path, column: str, mask: str) -> Foreign:
    files = _data_files(folder)
    shards = [ArrowShard(file, column) for file in files]
    named = chosen_column(folder, columns_of(files[0]), mask)
    if named is None:
        return Foreign(shards, (), files, column)
    labels = named.endswith("labels")
    masks = [
        TokenMask(ArrowShard(file, named), shard, labels=labels, name=f"{named!r} of {file}")
        for file, shard in zip(files, shards, strict=True)
    ]
    return Foreign(shards, masks, files, f"{column} {named}")


def _tokenized(files: Sequence[Path], mask: str) -> Foreign:
    if mask not in ("auto", "none"):
        raise CorpusError(
            f"A mask of datatrove's is the file NAME.ds.loss beside NAME.ds and is used where it lies; leave "
            f"out `mask`, which is {mask!r}.",
            setting="corpus.mask",
        )
    shards = [DatatroveShard(file) for file in files]
    masks: list[Mask | None] = []
    read: list[Path] = []
    for file, shard in zip(files, shards, strict=True):
        beside = file.with_name(file.name + ".loss")
        used = mask == "auto" and beside.is_file()
        masks.append(TokenMask(DatatroveMask(file), shard, labels=False, name=str(beside)) if used else None)
        read += [file, file.with_name(file.name + ".index"), *([beside] if used else [])]
    return Foreign(shards, masks, read, "loss" if any(masks) else "")


def _indexed(prefixes: Sequence[Path], mask: str) -> Foreign:
    shards = [MegatronShard(prefix) for prefix in prefixes]
    files = [Path(f"{prefix}{ending}") for prefix in prefixes for ending in (".bin", ".idx")]
    if mask in ("auto", "none"):
        return Foreign(shards, (), files)
    theirs = _prefixes(Path(mask).absolute())
    if len(theirs) != len(prefixes):
        raise CorpusError(
            f"The mask {mask} has {len(theirs)} pairs of .bin and .idx, and the corpus has {len(prefixes)}; "
            "name a second prefix (or folder) with 0 or 1 for each token of the same documents.",
            setting="corpus.mask",
        )
    masks = [
        TokenMask(MegatronShard(prefix), shard, labels=False, name=f"{prefix}.bin")
        for prefix, shard in zip(theirs, shards, strict=True)
    ]
    files += [Path(f"{prefix}{ending}") for prefix in theirs for ending in (".bin", ".idx")]
    return Foreign(shards, masks, files, "mask")


def _prefixes(path: Path) -> list[Path]:
    """Paths, without endings, of Megatron's pairs of files at a path, a prefix or a folder."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if Path(f"{prefix}.idx").is_file():
        return [prefix]
    if not path.is_dir() or any(path.glob("*.ds")):
        return []
    return [file.with_suffix("") for file in sorted(path.glob("*.idx"))]


def _data_files(folder: Path) -> list[Path]:
    file = folder / "state.json"
    try:
        return [folder / entry["filename"] for entry in _read_json(file, "_data_files")]
    except (KeyError, TypeError) as error:
        raise _damaged(file, error) from error


def _read_json(file: Path, key: str) -> list[Any]:
    """The list that a JSON object has under a key."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))[key]
        if not isinstance(found, list):
            raise TypeError(f"{key} is no list")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(file, error) from error
    return found


def _damaged(file: Path, error: Exception) -> CorpusError:
    return CorpusError(f"{file} is damaged ({error!r}); save the dataset again.")


def fingerprint_of_files(files: Iterable[Path], read_as: str = "") -> str:
    """16 hexadecimal digits of names, sizes, and pages spread over each file, as hashing all takes hours, and
    of what is read of them.

    They do not change when the files are copied elsewhere.
    """
    digest = hashlib.sha256(read_as.encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for place in range(SAMPLES):
                stream.seek(max(size - SAMPLE_BYTES, 0) * place // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
