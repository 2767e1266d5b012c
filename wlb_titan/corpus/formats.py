"""The files at a corpus' path, by the tool that wrote them, as docs/corpus.md lists them.

Label masks say which tokens of a document a model learns to predict, and which it only reads: a value for
each token, in a mask 1 or 0, in labels a learned token once more and IGNORED elsewhere. A document's first
token is never a label, whatever its mask says: nothing comes before it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from wlb_titan.arrays import Bools, Ints
from wlb_titan.corpus.shards import (
    BLOCK,
    MASK,
    PLAIN,
    TOKENS,
    ArrowShard,
    DatatroveShard,
    MegatronShard,
    Shard,
    Tokens,
)
from wlb_titan.errors import CorpusError, reading
from wlb_titan.files import load

SWITCH = re.compile(r"(^|_)(weights?|train(able|ed|ing)?|loss|masks?|masked|learn(ed)?)(_|$)")
"""Keys and columns by whose names data say how much of it is learned."""

MASKS = ("labels", "loss_mask", MASK, "completion_mask")  # columns that say what is learned

SAMPLES = 16  # places of a file that its fingerprint reads
SAMPLE_BYTES = 4096


class Opened(NamedTuple):
    shards: Sequence[Shard]
    files: Sequence[Path]  # all that are read
    read_as: str = ""  # what is read as tokens and as mask, for the fingerprint
    noted: str = ""  # the fingerprint of the files that a dataset's state.json has


def open_shards(path: Path, column: str, mask: str) -> Opened | None:
    """The corpus at the absolute `path`; None if of no known kind.

    `column` and `mask` are columns of Hugging Face's datasets: token ids, and which are learned. Megatron's
    `mask` is the prefix of a second pair of files (or a folder of pairs) with 0 or 1 for each token. "auto"
    takes any mask that is found, "none" takes no mask.
    """
    if (path / "dataset_dict.json").is_file():
        raise CorpusError(
            f"{path} contains several splits; name the folder of one, such as {path / 'train'}."
        )
    if (path / "state.json").is_file():
        return _dataset(path, column, mask)
    if path.suffix == ".ds" and path.is_file():
        return _datatrove([path], mask)
    files, prefixes = _visible(path, "*.ds"), _prefixes(path)
    if files and prefixes:
        raise CorpusError(
            f"{path} contains files of datatrove ({files[0].name}) and of Megatron ({prefixes[0].name}.idx); "
            "give the path of one of the two."
        )
    if files:
        return _datatrove(files, mask)
    return _megatron(prefixes, mask) if prefixes else None


def _visible(folder: Path, pattern: str) -> list[Path]:
    """Sorted; macOS leaves files `._NAME` beside others."""
    return sorted(f for f in folder.glob(pattern) if not f.name.startswith(".") and f.is_file())


def _dataset(folder: Path, column: str, mask: str) -> Opened:
    state = folder / "state.json"
    with reading(lambda reason: CorpusError(f"{state} is damaged ({reason}); save the dataset again.")):
        facts = load(dict[str, Any], state)
        files, noted = [folder / entry["filename"] for entry in facts["_data_files"]], facts["_fingerprint"]
        if not files:
            raise ValueError("it names no files")
    shards = [ArrowShard(file, column) for file in files]
    masking = _mask_column(folder, shards[0].columns, mask)
    for shard in shards:
        shard.beside = {name: ArrowShard(shard.path, name) for name in PLAIN if name in shard.columns}
        if mask != "none":
            others = MASKS if mask != "auto" else ()
            _check_columns(shard, {TOKENS, column, masking, *shard.beside, *others})
    if not masking:
        return Opened(shards, files, column, noted)
    for shard in shards:
        values, name = ArrowShard(shard.path, masking), f"{masking!r} of {shard.path}"
        shard.mask = LabelMask(values, shard, labels=masking.endswith("labels"), name=name)
    return Opened(shards, files, f"{column} {masking}", noted)


def _check_columns(shard: ArrowShard, followed: set[str]) -> None:
    """Refuses columns that may say of each token what is done with it."""
    for field in shard.schema:
        kind = getattr(field.type, "value_type", pa.null())  # of a list, of whichever kind
        numbers = any(test(kind) for test in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))
        if field.name not in followed and (numbers or SWITCH.search(field.name)):
            raise CorpusError(
                f"{shard.path} has a column {field.name!r}, which is not read. If its 1s and 0s say which "
                "tokens are learned, name it with wlb.corpus.mask (in a mixture, `mask` of the source); "
                f'otherwise save the dataset with .remove_columns({field.name!r}). "none" learns every '
                "token, whatever columns there are.",
                setting="corpus.mask",
            )


def _mask_column(path: Path, columns: Sequence[str], wanted: str) -> str:
    masks = [column for column in MASKS if column in columns] if wanted == "auto" else [wanted]
    if wanted == "none" or not masks:
        return ""
    if masks[0] not in columns:
        raise CorpusError(
            f"{path} has no column {wanted!r}; it has {', '.join(columns)}.", setting="corpus.mask"
        )
    if len(masks) > 1:
        raise CorpusError(
            f"{path} has several columns that say what is learned: {', '.join(masks)}. Name one of them with "
            'wlb.corpus.mask (in a mixture, `mask` of the source); "none" learns every token.',
            setting="corpus.mask",
        )
    return masks[0]


def _datatrove(files: Sequence[Path], mask: str) -> Opened:
    if mask not in ("auto", "none"):
        raise CorpusError(
            f"A mask of datatrove is NAME.ds.loss beside NAME.ds; leave out `mask`, which is {mask!r}.",
            setting="corpus.mask",
        )
    shards, read = [DatatroveShard(file) for file in files], []
    for shard in shards:
        index, loss = (shard.path.with_name(shard.path.name + ending) for ending in (".index", ".loss"))
        read += [shard.path, index]
        if mask == "auto" and loss.is_file():
            values = DatatroveShard(shard.path, loss=True)
            shard.mask = LabelMask(values, shard, labels=False, name=str(loss))
            read.append(loss)
    bare = [shard.path.name for shard in shards if not shard.mask]
    if 0 < len(bare) < len(shards):
        raise CorpusError(
            f"{bare[0]} has no mask {bare[0]}.loss, although other files beside it have one; write all "
            "masks, or none."
        )
    return Opened(shards, read, "" if bare else "loss")


def _megatron(prefixes: Sequence[Path], mask: str) -> Opened:
    shards, masked = [MegatronShard(prefix) for prefix in prefixes], mask not in ("auto", "none")
    masks = _prefixes(Path(mask).absolute()) if masked else []
    if masked and len(masks) != len(prefixes):
        raise CorpusError(
            f"The mask {mask} has {len(masks)} pairs of .bin and .idx, and the corpus has {len(prefixes)}; "
            "name a prefix (or folder) with 0 or 1 for each token of the same documents.",
            setting="corpus.mask",
        )
    if among := [prefix for prefix in prefixes if len(prefixes) > 1 and "mask" in prefix.name]:
        raise CorpusError(
            f"{among[0]}.idx is in the folder of the documents but named like a mask; move it and its .bin "
            "to another folder, and set wlb.corpus.mask to the path there.",
            setting="corpus.mask",
        )
    for shard, prefix in zip(shards, masks, strict=False):
        shard.mask = LabelMask(MegatronShard(prefix), shard, labels=False, name=f"{prefix}.bin")
    files = [Path(f"{prefix}{ending}") for prefix in (*prefixes, *masks) for ending in (".bin", ".idx")]
    return Opened(shards, files, "mask" if masked else "")


def _prefixes(path: Path) -> list[Path]:
    """Megatron's pairs of files at a path, a prefix or a folder, without endings."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if Path(f"{prefix}.idx").is_file():
        return [prefix]
    return [file.with_suffix("") for file in _visible(path, "*.idx")]


def fingerprint_of(files: Sequence[Path], read_as: str = "") -> str:
    """16 hexadecimal digits; as hashing all takes hours, of names, sizes and some pages of each file."""
    digest = hashlib.sha256(read_as.encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for place in range(SAMPLES):
                stream.seek(max(size - SAMPLE_BYTES, 0) * place // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


IGNORED = -100  # the label of a token that is not learned


class LabelMask:
    """A value for each token: 0 or 1, or with `labels` a label. Messages say `name`, the column or file."""

    def __init__(self, values: Shard, tokens: Shard, *, labels: bool, name: str) -> None:
        if values.documents != tokens.documents:
            raise CorpusError(
                f"The mask {name} has {values.documents:,} documents, but {tokens.path} has "
                f"{tokens.documents:,}; write both from the same documents."
            )
        for start in range(0, tokens.documents, BLOCK):
            rows = np.arange(start, min(start + BLOCK, tokens.documents))
            counts, wanted = values.lengths(rows), tokens.lengths(rows)
            if (different := np.flatnonzero(counts != wanted)).size:
                place = int(different[0])
                raise CorpusError(
                    f"The mask {name} has {counts[place]:,} values for {tokens.source(start + place)}, which "
                    f"has {wanted[place]:,} tokens; it must have one value for each token."
                )
        self._values, self._tokens, self._labels, self._name = values, tokens, labels, name

    def read(self, row: int, start: int, length: int) -> Bools:
        """bool (length,), which of these tokens of a document are learned; other values are refused."""
        values = self._values.read(row, start, length)
        refused = self._refused(values, self._tokens.read(row, start, length))
        if refused.any():
            place = int(np.argmax(refused))
            raise CorpusError(self._complaint(row, start + place, int(values[place])))
        return self._learned(values)

    def fits(self, rows: Ints, most: int) -> bool:
        """Whether `read` takes the first `most` values of each of these documents."""
        return not self._refused(self._values.gathered(rows, most), self._tokens.gathered(rows, most)).any()

    def count(self, rows: Ints, starts: Ints, stops: Ints) -> Ints:
        """int64 (n,), learned tokens among start .. stop - 1 of each document; most are there whole."""
        begins, ends = self._values.bounds(rows)
        counts, values = self._of_documents[rows], self._values.values
        (parts,) = np.nonzero((starts != 1) | (begins + stops != ends))
        for part, begin in zip(parts.tolist(), begins[parts].tolist(), strict=True):
            counts[part] = np.count_nonzero(self._learned(values[begin + starts[part] : begin + stops[part]]))
        return counts

    @cached_property
    def _of_documents(self) -> Ints:
        """int64 (documents,), learned tokens of each document without its first. Reads the whole mask, which
        takes a second for 10^9 tokens, in the first step and not when a corpus is opened."""
        documents, labels = self._values.documents, [np.zeros(0, dtype=np.int64)]
        at_a_time = max(BLOCK * documents // max(self._values.tokens, 1), 1)
        for start in range(0, documents, at_a_time):
            rows = np.arange(start, min(start + at_a_time, documents))
            lengths, learned = self._values.lengths(rows), self._learned(self._values.gathered(rows, 1 << 62))
            ends, before = np.cumsum(lengths), np.cumsum(np.append(0, learned))
            labels.append(before[ends] - before[np.minimum(ends - lengths + 1, ends)])
        return np.concatenate(labels)

    def _refused(self, values: Tokens, tokens: Tokens) -> Bools:
        learned = self._learned(values)
        refused: Bools = learned & (values != tokens) if self._labels else ~learned & (values != 0)
        return refused

    def _learned(self, values: Tokens) -> Bools:
        learned: Bools = values != IGNORED if self._labels else values == 1
        return learned

    def _complaint(self, row: int, place: int, value: int) -> str:
        where = f"Token {place} of {self._tokens.source(row)}"
        if not self._labels:
            return f"{where} has the value {value} in the mask {self._name}; a mask has 1 and 0 only."
        token = int(self._tokens.read(row, place, 1)[0])
        return (
            f"{where} is {token}, and its label in {self._name} is {value}; a label is the token at its own "
            f"place, or {IGNORED}. Labels that are shifted by one already must be shifted back."
        )
