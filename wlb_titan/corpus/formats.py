"""The files at a corpus' path, by the tool that wrote them, as docs/corpus.md lists them.

Label masks say which tokens of a document a model learns to predict, and which it only reads: a value for
each token, in a mask 1 or 0, in labels a learned token once more and IGNORED elsewhere. A document's first
token is never a label, whatever its mask says: nothing comes before it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from wlb_titan.arrays import Ints
from wlb_titan.corpus.shards import DatatroveShard, LabelMask, MegatronShard, Shard
from wlb_titan.errors import CorpusError, refusing, regular_file
from wlb_titan.files import load

# Columns of a prepared corpus: token ids, which of them are learned, and where the text came from.
TOKENS, MASK, SOURCE = "input_ids", "assistant_masks", "source"

ROWS, POSITIONS = "seq_lengths", "position_ids"
PLAIN: dict[str, Any] = {"attention_mask": 1, "token_type_ids": 0, POSITIONS: None, ROWS: None}
"""Columns that may lie beside the tokens, with what they say of a row that is one document."""

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
    with refusing(lambda reason: CorpusError(f"{state} is damaged ({reason}); save the dataset again.")):
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


class ArrowShard(Shard):
    """An Arrow file in stream format, as of `datasets`; `column` has a list of integers per document."""

    def __init__(self, path: Path, column: str = TOKENS) -> None:
        self.path, self._column = path, column
        self.beside: dict[str, ArrowShard] = {}  # those of `PLAIN`
        with refusing(lambda reason: CorpusError(f"{path} cannot be read ({reason}).")):
            self._pages = pa.memory_map(str(regular_file(path))).read_buffer()
            table = self._table()
            table.validate()
            self.columns, self.schema = table.column_names, table.schema
        offset_type, dtype = _list_types(table.schema, column, path)
        # The whole file as offsets and as values, so that one lookup serves all record batches.
        self._offsets, self.values = (
            np.frombuffer(self._pages, kind, self._pages.size // kind.itemsize)
            for kind in (offset_type, dtype)
        )
        lists = [chunk for chunk in table.column(column).chunks if len(chunk)]
        at = np.array([_addresses(chunk) for chunk in lists], dtype=np.int64).reshape(-1, 2)
        at -= self._pages.address
        if ((at < 0) | (at >= self._pages.size)).any():
            raise CorpusError(
                f"{path} is compressed, so it cannot be read in place; write it without compression."
            )
        offsets_at, self._values_at = at[:, 0] // offset_type.itemsize, at[:, 1] // dtype.itemsize
        self._sizes = np.array([len(chunk.values) for chunk in lists], dtype=np.int64)
        counts = np.array([len(chunk) for chunk in lists], dtype=np.int64)
        self._firsts = np.cumsum(counts) - counts  # rows
        for first, chunk in zip(self._firsts, lists, strict=True):
            if chunk.null_count or chunk.values.null_count:
                nulls = (i for i, row in enumerate(chunk) if row.values is None or row.values.null_count)
                where = f"Row {first + next(nulls, 0)} of {path}"
                raise CorpusError(
                    f"{where} has a null in the column {column!r}, where every entry must be a number."
                )
        self._first_offsets = offsets_at - self._firsts  # where that of row 0 would be
        self.documents = int(counts.sum())
        begins, ends = self._offsets[offsets_at], self._offsets[offsets_at + counts]
        self.tokens = int((ends - begins).sum(dtype=np.int64))

    def bounds(self, rows: Ints) -> tuple[Ints, Ints]:
        batches = np.searchsorted(self._firsts, rows, side="right") - 1
        at = self._first_offsets[batches] + rows
        begins, ends = self._offsets[at], self._offsets[at + 1]
        if ((begins < 0) | (ends < begins) | (ends > self._sizes[batches])).any():
            raise CorpusError(
                f"{self.path} is damaged: offsets of its column {self._column!r} point outside the file. "
                "Copy it again."
            )
        values_at = self._values_at[batches]
        return values_at + begins, values_at + ends

    def check_columns(self) -> None:
        rows = max((1 << 18) * self.documents // max(self.tokens, 1), 1)  # at a time
        for name, column in self.beside.items():
            for start in range(0, self.documents, rows):
                block = np.arange(start, min(start + rows, self.documents))
                lengths = self.lengths(block)
                counts, wanted = column.lengths(block), np.ones_like(lengths) if name == ROWS else lengths
                plain: Any = lengths if name == ROWS else PLAIN.get(name)
                if name == POSITIONS:
                    plain = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
                if (counts != wanted).any() or (column.gathered(block, 1 << 62) != plain).any():
                    raise CorpusError(
                        f"{self.path} has a column {name!r} that shows rows with padding or with several "
                        "documents. Save the dataset as it was before it was padded or packed: documents are "
                        "packed during training."
                    )

    def source(self, row: int) -> str:
        return str(self._table().column(SOURCE)[row]) if SOURCE in self.columns else super().source(row)

    def _table(self) -> pa.Table:
        """Views of the file."""
        with pa.ipc.open_stream(self._pages) as stream:
            return stream.read_all()


def _addresses(lists: pa.Array) -> tuple[int, int]:
    _, offsets, _, values = lists.buffers()
    return offsets.address, (values or offsets).address


def _list_types(schema: pa.Schema, column: str, path: Path) -> tuple[np.dtype[Any], np.dtype[Any]]:
    if column not in schema.names:
        lists = [field.name for field in schema if pa.types.is_list(field.type)]
        raise CorpusError(
            f"{path} has no column {column!r}; it has {', '.join(schema.names)}. Name the one that holds the "
            f"token ids with `column`{f', such as {lists[0]!r}' if lists else ''}."
        )
    kind = schema.field(column).type
    large = pa.types.is_large_list(kind)
    if not (large or pa.types.is_list(kind)) or not pa.types.is_integer(kind.value_type):
        raise CorpusError(
            f"The column {column!r} of {path} holds {kind}, but must hold a list of integers. Save the "
            f"dataset with .cast_column({column!r}, datasets.List(datasets.Value('int32')))."
        )
    return np.dtype(np.int64 if large else np.int32), np.dtype(str(kind.value_type))


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
