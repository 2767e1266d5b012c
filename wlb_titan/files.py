"""Small files: JSON or TOML read as a type, and files that are written whole or not at all."""

import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from wlb_titan.errors import regular_file


def load(hint: Any, path: str | os.PathLike[str], *, toml: bool = False) -> Any:
    """What JSON or TOML in a file is, `checked`. Whatever is wrong with the file is for `errors.refusing`."""
    text = regular_file(path).read_text(encoding="utf-8")
    return checked(hint, tomllib.loads(text) if toml else json.loads(text))


def checked(hint: Any, value: object) -> Any:
    """A value of JSON or TOML as `hint`, a dataclass or another type that pydantic knows. A ValueError names
    keys that are missing, unknown, or of another type or range than the hint allows."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # takes long

    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    try:  # a dataclass by itself would not take the configuration
        return TypeAdapter(hint | None, config=config).validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        raise ValueError("; ".join(map(_wrong, error.errors()[:3]))) from None


def _wrong(error: Mapping[str, Any]) -> str:
    from wlb_titan.toml.values import rule  # with tomli, which planning does without

    found = f"is {json.dumps(error['input'], default=str)[:80]}, but {rule(dict(error, loc=()))}"
    known = {"missing": "is missing", "unexpected_keyword_argument": "is not known"}
    return f"{'.'.join(map(str, error['loc'])) or 'it'} {known.get(error['type'], found)}"


def digest(files: Iterable[Path]) -> str:
    """Of what files have, in this order: 8 hexadecimal digits."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def save(path: str | os.PathLike[str], content: Any, *, indent: int | None = None) -> None:
    """Writes a text, or anything else as JSON, beside `path` and then in its place: whatever ends this,
    readers find the former file or all of the new one. A link or a device is written to directly."""
    path = Path(path)
    text = content if isinstance(content, str) else json.dumps(content, indent=indent) + "\n"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
