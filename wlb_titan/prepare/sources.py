"""Sources of documents, which are read by number: numbers are shuffled instead of texts, and a bounded corpus
reads only the documents that it takes."""

from __future__ import annotations

import json
import os
import re
import shutil
import sysconfig
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, filterfalse
from pathlib import Path
from typing import Any, NamedTuple

from wlb_titan.errors import CorpusError, refusing, regular_file
from wlb_titan.prepare.shapes import advice, conversation, shape_of, text_of

SOURCES = (
    "python-source, text:DIR, jsonl:FILE_OR_DIR#field, parquet:FILE_OR_DIR#field, "
    "hf:NAME[,CONFIG][@SPLIT][#field]"
)

NamedFiles = list[tuple[str, Path]]  # documents of one file each


@dataclass(frozen=True)
class SourceSpec:
    """`jsonl:a.jsonl#body` is kind `jsonl`, location `a.jsonl`, field `body`."""

    kind: str
    location: str = ""  # a file, a folder, or a name on the Hugging Face hub
    field: str = "text"  # the column that holds the text
    config: str | None = None  # Hugging Face only
    split: str = "train"  # Hugging Face only, such as `train[:1%]`

    @classmethod
    def parse(cls, text: str, field: str = "text") -> SourceSpec:
        """Parses a description without looking anything up; `field` is used where it names none."""
        if text == "python-source":
            return cls(text)
        kind, _, rest = text.partition(":")
        if kind == "text" and rest:
            return cls(kind, rest)
        location, field = rest.rsplit("#", 1) if "#" in rest else (rest, field)
        if kind in ("jsonl", "parquet") and location and field:
            return cls(kind, location, field)
        name = re.fullmatch(r"([^,@]+)(?:,([^,@]+))?(?:@([^@]+))?", location)
        if kind == "hf" and name and field:
            return cls(kind, name[1], field, name[2], name[3] or "train")
        file = re.sub(r"^\s*(jsonl|parquet):", "", text, flags=re.IGNORECASE)
        ending = Path(file.partition("#")[0]).suffix.removeprefix(".")
        advice = f" For this file write {ending}:{file}." if ending in ("jsonl", "parquet") else ""
        raise CorpusError(f"{text!r} is not a source of documents; the sources are {SOURCES}.{advice}")


class Part(NamedTuple):
    rows: int
    name: Callable[[int], str]  # by a row's number
    row: Callable[[int], Any]


class Source:
    """Documents, numbered from 0 in an order that depends only on their names or places."""

    def __init__(self, parts: Sequence[Part], value: Callable[[Any], Any] = lambda row: row) -> None:
        self._parts, self._value = parts, value
        self._ends = list(accumulate(part.rows for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def name(self, document: int) -> str:
        part, row = self._place(document)
        return part.name(row)

    def read(self, document: int) -> Any:
        """The text, or for chat the result of `conversation`; a ValueError says why it cannot be read."""
        part, row = self._place(document)
        with refusing(CorpusError):
            return self._value(part.row(row))

    def _place(self, document: int) -> tuple[Part, int]:
        part = bisect_right(self._ends, document)
        return self._parts[part], document - (self._ends[part - 1] if part else 0)


def open_source(spec: SourceSpec, cache: Path, *, chat: bool = False) -> Source:
    """Finds the documents; `datasets` converts files into the folder `cache`, which the caller deletes."""
    if spec.kind == "python-source":
        return Source([_files(python_documents())])
    if spec.kind == "text":
        return Source([_files(text_documents(Path(spec.location)), Path(spec.location).resolve())])
    value = partial(conversation if chat else text_of, field=spec.field)
    if spec.kind == "hf":
        return Source([_hub(spec, chat)], value)
    files = _files_at(spec.kind, Path(spec.location))
    if spec.kind == "jsonl":
        return Source([_lines(file, unpacked(file, cache)) for file in files], value)
    parts = [_parquet(file, cache / f"{n}.arrow", spec.field, chat) for n, file in enumerate(files)]
    return Source(parts, value)


def _files(documents: NamedFiles, within: Path | None = None) -> Part:
    """One document per file; links that lead out of the folder `within` are reported as unreadable."""

    def text(number: int) -> str:
        path = documents[number][1]
        content = regular_file(path).read_bytes()
        if within and path.is_symlink() and within not in path.resolve().parents:
            raise ValueError("a link that leads out of the folder")
        decoded = content.decode("utf-8")
        if "\0" in decoded:
            raise ValueError("not text: it has a zero byte")
        return decoded

    return Part(len(documents), lambda number: documents[number][0], text)


def python_documents() -> NamedFiles:
    """The Python files of this interpreter: its standard library and its installed packages."""
    labels = {"stdlib": "stdlib", "purelib": "site-packages", "platlib": "site-packages"}
    roots = {Path(sysconfig.get_path(key)).resolve(): label for key, label in labels.items()}
    documents = []
    for root, label in roots.items():
        # A base interpreter's standard library holds packages that a virtual environment does not see.
        skipped = {"site-packages", "dist-packages"} if label == "stdlib" else set()
        paths = _files_below(root, skipped.__contains__)
        documents += [(f"{label}/{_name(root, path)}", path) for path in paths if path.suffix == ".py"]
    return documents


def text_documents(folder: Path) -> NamedFiles:
    """The files below `folder`, except hidden ones and those in hidden folders."""
    if not folder.is_dir():
        raise CorpusError(f"The source text:{folder} needs a folder, but {folder.absolute()} is not one.")
    paths = _files_below(folder, lambda name: name.startswith("."))
    documents = [(_name(folder, path), path) for path in paths]
    if not documents:
        raise CorpusError(f"The source text:{folder} has no files, so there is nothing to prepare.")
    return documents


def _files_below(root: Path, skip: Callable[[str], bool]) -> Iterator[Path]:
    """The files below `root`, sorted, without files and folders whose name `skip` accepts. Folders that
    cannot be opened come last, as files: reading them fails, and the user is told."""
    closed: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=closed.append):
        folders[:] = sorted(filterfalse(skip, folders))
        for name in sorted(filterfalse(skip, files)):
            yield Path(folder, name)
    yield from sorted(Path(error.filename) for error in closed)


def _name(root: Path, path: Path) -> str:
    """The path inside `root`; bytes that are not UTF-8, which Linux allows in names, are escaped."""
    return path.relative_to(root).as_posix().encode("utf-8", "backslashreplace").decode("utf-8")


def _files_at(kind: str, location: Path) -> list[Path]:
    files = [location]
    if location.is_dir():
        files = sorted(file for file in location.rglob(f"*.{kind}*") if file.suffix in (f".{kind}", *PACKED))
    for file in files:
        if file.suffix in PACKED and (kind != "jsonl" or PACKED[file.suffix] is None):
            raise CorpusError(
                f"The source {kind}:{location} has {file.name}, which is compressed; unpack it."
            )
    if not files or not all(file.is_file() for file in files):
        raise CorpusError(
            f"The source {kind}:{location} needs a file, or a folder with files *.{kind}, but there is none."
        )
    return files


PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".xz": None, ".zip": None, ".lz4": None}
"""What pyarrow calls a compression that it can unpack, by a file's ending."""


def unpacked(path: Path, cache: Path) -> Path:
    """The file, or what is packed in it, written into the folder `cache`."""
    if path.suffix not in PACKED:
        return path
    import pyarrow as pa

    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"{len(list(cache.iterdir()))}-{path.stem}"
    try:
        with pa.CompressedInputStream(str(path), PACKED[path.suffix]) as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file)
    except OSError as error:
        raise CorpusError(f"{path} cannot be unpacked: {error}. Write it again, or unpack it.") from error
    return target


def _lines(file: Path, path: Path) -> Part:
    """The lines of `file`, unpacked at `path`, that are not blank; it is read once before, to find them.

    Lines need only the field in common; `datasets` would parse all into one table, and refuse files whose
    other fields change their type.
    """
    numbers, begins, begin = array("q"), array("q"), 0  # there may be a hundred million
    with path.open("rb") as opened:
        for number, line in enumerate(opened, start=1):
            if not line.isspace():
                numbers.append(number)
                begins.append(begin)
            begin += len(line)

    def row(place: int) -> Any:
        with path.open("rb") as opened:
            opened.seek(begins[place])
            return json.loads(opened.readline().rstrip())

    return Part(len(numbers), lambda place: f"{file.name}:{numbers[place]}", row)


def _hub(spec: SourceSpec, chat: bool) -> Part:
    import datasets  # takes seconds

    try:
        # Downloads go into the user's own Hugging Face cache, where they stay.
        rows = datasets.load_dataset(spec.location, spec.config, split=spec.split)
    except Exception as error:  # the errors of `datasets` have no common base
        cause = error.__cause__ or error
        line = str(cause).strip().partition("\n")[0]
        raise CorpusError(f"Cannot read hf:{spec.location}: {type(cause).__name__}: {line}") from error
    rows = rows.select_columns(_columns(spec.location, rows.column_names, spec.field, chat))
    return Part(len(rows), lambda place: f"{spec.location}[{place}]", lambda place: _dense(rows[place]))


def _parquet(file: Path, target: Path, field: str, chat: bool) -> Part:
    """A file, written to `target`, where rows are found by number. `datasets` knows no maps."""
    import pyarrow as pa
    from pyarrow.dataset import dataset

    target.parent.mkdir(parents=True, exist_ok=True)
    with refusing(lambda reason: CorpusError(f"Cannot read parquet:{file}: {reason}.")):
        found = dataset(str(file), format="parquet")
        if not found.count_rows():
            return Part(0, str, str)  # it may have no columns
        columns = _columns(str(file), found.schema.names, field, chat)
        scanner = found.scanner(columns=columns, batch_size=1024)
        with pa.ipc.new_stream(str(target), scanner.projected_schema) as writer:
            for batch in scanner.to_batches():
                writer.write_batch(batch)
        table = pa.ipc.open_stream(pa.memory_map(str(target))).read_all()

    def row(place: int) -> dict[str, Any]:
        return _dense(table.slice(place, 1).to_pylist(maps_as_pydicts="strict")[0])

    return Part(table.num_rows, lambda place: f"{file.name}[{place}]", row)


def _columns(location: str, columns: list[str], field: str, chat: bool) -> list[str]:
    """Those to read: of conversations all, as what is not followed is refused."""
    if field in columns or (chat and shape_of(columns, field)):
        return columns if chat else [field]
    raise CorpusError(
        f"{location} has no field {field!r}; it has {', '.join(columns)}{advice(field, columns)}."
    )


def _dense(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the nulls in its values: Arrow gives every struct of a column the keys of all."""
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
