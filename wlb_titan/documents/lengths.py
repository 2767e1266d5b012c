"""Document lengths from a text file, one a line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wlb_titan.errors import PlanError

DIGITS = 13  # of the longest
LONGEST = 2**40  # tokens; anything above is a slip of the pen, and sums stay far from overflow


def read_lengths(path: Path) -> NDArray[np.int64]:
    """int64 (documents,), the numbers of the file's lines in their order.

    Raises:
        PlanError: the file cannot be read, is empty, or has a line that is no positive whole number; the
            message names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise PlanError(f"The file of lengths {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is not a text file of lengths: {error}.") from error
    if lines[-1] == "":
        lines.pop()  # what follows the last line's end
    if not lines:
        raise PlanError(f"The file of lengths {path} is empty; it must have one document's length a line.")
    lengths = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        digits = text.isascii() and text.isdigit() and len(text) <= DIGITS
        if not (digits and 0 < int(text) <= LONGEST):
            raise PlanError(f"{path}, line {number}: {_complaint(text)}. Each line is one document's length.")
        lengths.append(int(text))
    return np.array(lengths, dtype=np.int64)


def _complaint(text: str) -> str:
    if not text:
        return "the line is blank"
    if not re.fullmatch(r"-?[0-9]+", text):
        return f"{text[:40]!r} is not a whole number of tokens, written with digits only"
    if text.startswith("-") or not text.strip("0"):
        return f"the length is {text[:40]}, and a document has at least one token"
    return f"{text[:40]} is too large for a number of tokens"
