"""Sources of documents. A source knows how many there are and reads any of them.

That documents are read by number makes shuffling simple: the numbers are shuffled, not the texts, and a
bounded corpus reads only the documents that it takes.
"""

from __future__ import annotations

import json
import os
import stat
import sysconfig
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import filterfalse
from pathlib import Path
from typing import Any, Protocol

import datasets
import pyarrow as pa

from wlb_titan.corpus.settings import PrepareSettings, SourceSpec
from wlb_titan.errors import CorpusError

FileDocument = tuple[str, list[tuple[str, Path]]]
"""A document's name, and the name and path of each of its files."""


@dataclass(frozen=True)
class Unreadable:
    """A file or record that could not be read."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Source(Protocol):
    """Documents, numbered from 0 in an order that depends on nothing but their names or places."""

    def __len__(self) -> int:
        """The number of documents."""
        ...

    def name(self, document: int) -> str:
        """Where the document comes from."""
        ...

    def read(self, document: int) -> Iterator[str | Unreadable]:
        """The document's text in one or more pieces, to be joined without anything in between."""
        ...


def open_source(settings: PrepareSettings, cache: Path) -> Source:
    """Find the documents of a source, without reading them.

    Args:
        cache: folder for what `datasets` converts on the way; to be deleted by the caller.

    Raises:
        CorpusError: there is nothing at the place that the source names.
    """
    spec = settings.spec
    if spec.kind == "python-source":
        return Files(python_documents(by_package=settings.granularity == "package"))
    if spec.kind == "text":
        return Files(text_documents(Path(spec.location)), within=Path(spec.location).resolve())
    if spec.kind == "jsonl":
        return JsonLines(Path(spec.location), spec.field, chat=settings.chat)
    return Rows(spec, cache, chat=settings.chat)


class Files:
    """Documents made of one file each, or of several that are joined.

    Args:
        within: a link that leads out of this folder is not read, but told; None reads all.
    """

    def __init__(self, documents: list[FileDocument], within: Path | None = None) -> None:
        self._documents = documents
        self._within = within

    def __len__(self) -> int:
        return len(self._documents)

    def name(self, document: int) -> str:
        return self._documents[document][0]

    def read(self, document: int) -> Iterator[str | Unreadable]:
        for name, path in self._documents[document][1]:
            try:
                if self._within and path.is_symlink() and self._within not in path.resolve().parents:
                    raise OSError("a link that leads out of the folder")
                if not stat.S_ISREG(path.stat().st_mode):
                    raise OSError("not a file")  # reading a pipe would wait for its writer
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError as error:
                yield Unreadable(name, f"not UTF-8: {error.reason} at byte {error.start}")
            except OSError as error:
                yield Unreadable(name, error.strerror or str(error))
            else:
                yield text if "\0" not in text else Unreadable(name, "not text: it has a zero byte")


def python_documents(*, by_package: bool) -> list[FileDocument]:
    """The Python files of this interpreter: its standard library and its installed packages.

    Args:
        by_package: one document a top-level package, its files joined in sorted order, and one a top-level
            module; otherwise one document a file.
    """
    # purelib and platlib are one folder on most machines; where they are two, both hold installed packages.
    labels = {"stdlib": "stdlib", "purelib": "site-packages", "platlib": "site-packages"}
    roots = {Path(sysconfig.get_path(key)).resolve(): label for key, label in labels.items()}
    documents: dict[str, list[tuple[str, Path]]] = {}
    for root, label in roots.items():
        # The standard library of a base interpreter holds packages that a virtual environment does not see.
        skipped = {"site-packages", "dist-packages"} if label == "stdlib" else set()
        for path in _files_below(root, skipped.__contains__):
            if path.suffix == ".py":
                name = f"{label}/{_name(root, path)}"
                package = "/".join(name.split("/")[:2])
                documents.setdefault(package if by_package else name, []).append((name, path))
    return list(documents.items())


def text_documents(folder: Path) -> list[FileDocument]:
    """The files below `folder`, except those with a dot in front of their name or their folder's.

    Raises:
        CorpusError: `folder` is no folder, or has no files.
    """
    if not folder.is_dir():
        raise CorpusError(f"The source text:{folder} needs a folder, and {folder.absolute()} is none.")
    paths = _files_below(folder, lambda name: name.startswith("."))
    documents = [(name, [(name, path)]) for path in paths for name in [_name(folder, path)]]
    if not documents:
        raise CorpusError(f"The source text:{folder} has no files, so there is nothing to prepare.")
    return documents


def _files_below(root: Path, skip: Callable[[str], bool]) -> Iterator[Path]:
    """The files below `root` in sorted order, without files and folders whose name `skip` is true for.

    Folders that cannot be opened come last, as if they were files: who reads them notices and tells the user.
    """
    closed: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=closed.append):
        folders[:] = sorted(filterfalse(skip, folders))
        for name in sorted(filterfalse(skip, files)):
            yield Path(folder, name)
    yield from sorted(Path(error.filename) for error in closed)


def _name(root: Path, path: Path) -> str:
    """The path inside `root`, with bytes that are no UTF-8 (Linux allows them in names) escaped."""
    return path.relative_to(root).as_posix().encode("utf-8", "backslashreplace").decode("utf-8")


class JsonLines:
    """One document a line of files of JSON objects, which need to have nothing but the field in common.

    The files are read once to find where their lines begin, when that is first asked for. (`datasets` would
    parse all of it into one table, and refuse a file whose other fields change their type.)

    Args:
        location: a file, or a folder of *.jsonl, which are read in the order of their names.
        field: the one that holds the text.
        chat: whether it holds a conversation, which is read as of `conversation`.
    """

    def __init__(self, location: Path, field: str, *, chat: bool = False) -> None:
        self._paths = sorted(location.glob("*.jsonl")) if location.is_dir() else [location]
        if not self._paths:
            raise CorpusError(f"The source jsonl:{location} has no files *.jsonl, so there is nothing in it.")
        for path in self._paths:
            if not path.is_file():
                raise CorpusError(f"The source jsonl:{path} needs a file, and there is none.")
        self._field = field
        self._chat = chat

    @cached_property
    def _lines(self) -> tuple[array[int], array[int], list[int]]:
        """Number from 1 in its file and first byte of each line that is not blank, and how many such lines
        come before each file.

        Arrays, not lists, as files may have a hundred million lines.
        """
        numbers, begins = array("q"), array("q")
        firsts = []
        for path in self._paths:
            firsts.append(len(numbers))
            start = 0
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.isspace():
                        numbers.append(number)
                        begins.append(start)
                    start += len(line)
        return numbers, begins, firsts

    def __len__(self) -> int:
        return len(self._lines[0])

    def name(self, document: int) -> str:
        return f"{self._path(document).name}:{self._lines[0][document]}"

    def read(self, document: int) -> Iterator[str | Unreadable]:
        with self._path(document).open("rb") as file:
            file.seek(self._lines[1][document])
            line = file.readline().rstrip()
        try:
            yield (conversation if self._chat else _text_of)(json.loads(line), self._field)
        except RecursionError:
            yield Unreadable(self.name(document), "too deeply nested")
        except ValueError as error:
            yield Unreadable(self.name(document), str(error))

    def _path(self, document: int) -> Path:
        return self._paths[bisect_right(self._lines[2], document) - 1]


def conversation(record: object, field: str) -> str:
    """The messages of a record and the tools that they may call, as JSON: {"messages": [...], "tools":
    [...]}.

    Raises:
        ValueError: the record has no such field.
    """
    value, tools = _field_of(record, field), record.get("tools") if isinstance(record, dict) else None
    return json.dumps({"messages": value, "tools": json.loads(tools) if isinstance(tools, str) else tools})


def _field_of(record: object, field: str) -> Any:
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if field not in record:
        raise ValueError(f"no field {field!r}; it has {', '.join(record)}{_advice(field, record)}")
    return record[field]


def _advice(field: str, fields: Iterable[str]) -> str:
    """What to do where that field is missing and these are there."""
    chat = "; for conversations add --chat" if field == "text" and "messages" in fields else ""
    return f"{chat}; another field is named after a #, as in --source jsonl:FILE#FIELD"


def _without_nulls(value: Any) -> Any:
    """Without keys that have no value: Arrow gives every struct of a column the keys of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _text_of(record: object, field: str) -> str:
    value = _field_of(record, field)
    text = "" if value is None else value
    if not isinstance(text, str):
        chat = "; if these are conversations, add --chat" if isinstance(text, list) else ""
        raise ValueError(f"the field {field!r} holds {type(text).__name__}, not text{chat}")
    text.encode("utf-8")  # JSON can spell half a surrogate pair, which is no character
    return text


class Rows:
    """One document a row of a Parquet file, or of a dataset in Hugging Face's form."""

    def __init__(self, spec: SourceSpec, cache: Path, *, chat: bool = False) -> None:
        self._chat = chat
        self._label = spec.location if spec.kind == "hf" else Path(spec.location).name
        self._field = spec.field
        self._rows = _load(spec, cache)
        columns = self._rows.features
        if spec.field not in columns:
            raise CorpusError(
                f"{spec.location} has no field {spec.field!r}; it has {', '.join(columns)}"
                f"{_advice(spec.field, columns)}."
            )
        kind = getattr(columns[spec.field], "dtype", type(columns[spec.field]).__name__)
        if not chat and kind not in ("string", "large_string", "null"):
            advice = " If these are conversations, add --chat." if kind in ("List", "LargeList") else ""
            raise CorpusError(f"The field {spec.field!r} of {spec.location} holds {kind}, not text.{advice}")
        self._rows = self._rows.select_columns(
            [spec.field, *(["tools"] if chat and "tools" in columns else [])]
        )

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, document: int) -> str:
        return f"{self._label}[{document}]"

    def read(self, document: int) -> Iterator[str | Unreadable]:
        try:
            row = self._rows[document]
            if self._chat:
                yield conversation({key: _without_nulls(value) for key, value in row.items()}, self._field)
            else:
                yield row[self._field] or ""
        except (ValueError, pa.ArrowException) as error:  # UnicodeDecodeError among the first
            yield Unreadable(self.name(document), str(error))


def _load(spec: SourceSpec, cache: Path) -> datasets.Dataset:
    location = Path(spec.location)
    files = sorted(map(str, location.glob("*.parquet"))) if location.is_dir() else spec.location
    if spec.kind != "hf" and not (files if location.is_dir() else location.is_file()):
        raise CorpusError(f"The source {spec.kind}:{spec.location} needs a file, and there is none.")
    try:
        if spec.kind == "hf":
            # Downloads stay in the user's own Hugging Face cache, to be found there again.
            return datasets.load_dataset(spec.location, spec.config, split=spec.split)
        return datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(cache))
    except Exception as error:  # `datasets` has no common base for what can go wrong
        cause = error.__cause__ or error
        first_line = str(cause).strip().partition("\n")[0]
        raise CorpusError(
            f"Cannot read {spec.kind}:{spec.location}: {type(cause).__name__}: {first_line}"
        ) from error
