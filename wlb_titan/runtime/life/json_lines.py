"""Figures on disk, which must never end training: what cannot be written is a warning, once."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, TextIO

from torchtitan.tools.logging import logger


@functools.cache
def warn_once(message: str) -> None:
    logger.warning(message)


class JsonLines:
    """A file of one JSON object a line, each with a `step`, which a resumed run goes on with.

    A run resumed from a checkpoint repeats the steps since then: with the first line, old lines of that step
    and later ones go, and lines that are none, as a crash leaves them. All others are kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def write(self, record: dict[str, Any]) -> None:
        """Appends a line. On a full disk the line is lost, and the next one is tried again."""
        try:
            if self._file is None:
                self._file = self._open_before(record["step"])
            self._file.write(json.dumps(record) + "\n")
        except OSError as error:
            warn_once(f"{self._path} cannot be written: {error.strerror}. Training goes on, lines are lost.")

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                warn_once(f"{self._path} may lack its last lines: {error.strerror}.")

    def _open_before(self, step: int) -> TextIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            writing = self._path.with_name(self._path.name + ".tmp")
            with (
                self._path.open(encoding="utf-8", errors="replace") as old,
                writing.open("w", encoding="utf-8") as new,
            ):
                new.writelines(line for line in old if self._is_kept(line, step))
            writing.replace(self._path)
        return self._path.open("a", buffering=1, encoding="utf-8")

    def _is_kept(self, line: str, step: int) -> bool:
        try:
            return line.endswith("\n") and json.loads(line)["step"] < step
        except (ValueError, KeyError, TypeError, RecursionError):
            warn_once(f"{self._path} had a line that is none, which a crash may have left; it is dropped.")
            return False
