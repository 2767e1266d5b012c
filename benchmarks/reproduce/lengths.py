"""The lengths of the paper's documents: one log-normal distribution that meets what is stated of them.

Stated of a window of 128K: the average document length varies about 1.4 times over its positions and peaks
in the middle (section 2.2); documents shorter than half a window have more than 75 % of the tokens (later
version); most are short and the longest reach the window. The loader fills windows in order; where one ends
in a document, the rest of it begins the next window (`carried`) or is lost (`dropped`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Ints
from wlb_titan.documents.lengths import NAMED

WINDOW = 131072
DOCUMENTS = 200_000
PLACES = 32  # positions of a window over which length is averaged


@cache
def documents(name: str = "paper") -> Ints:
    """int64 (DOCUMENTS,), tokens of the corpus' documents."""
    return NAMED[name].draw(DOCUMENTS)


def carried(lengths: Ints, window: int) -> Ints:
    """int64, pieces as a loader makes them that goes on with the rest of a cut document."""
    ends = np.cumsum(lengths)
    cuts = np.arange(window, ends[-1], window)
    return np.diff(np.union1d(ends, cuts), prepend=0)


def dropped(lengths: Ints, window: int) -> Ints:
    """int64, pieces as a loader makes them that loses the rest of a cut document."""
    pieces, room = [], window
    for length in lengths.tolist():
        pieces.append(min(length, room))
        room = room - pieces[-1] or window
    return np.array(pieces, dtype=np.int64)


@cache
def loaded(window: int, name: str) -> Ints:
    """int64, the pieces that all policies pack."""
    return carried(documents(name), window)


def by_position(pieces: Ints, window: int) -> NDArray[np.float64]:
    """float64 (PLACES,), mean length of the document that a token belongs to, by its place in the window."""
    ends = np.cumsum(pieces)
    windows = ends[-1] // window
    places = (np.arange(windows * PLACES) + 0.5) * (window / PLACES)
    # The document at the middle of each place stands for the place.
    at = np.searchsorted(ends, places, side="right")
    return pieces[at].reshape(windows, PLACES).mean(axis=0)


def stated(pieces: Ints, window: int = WINDOW) -> dict[str, Any]:
    """What the papers state, of pieces of documents."""
    profile = by_position(pieces, window)
    smooth = np.convolve(profile, np.ones(5) / 5, mode="valid")
    return {
        "position_ratio": float(profile.max() / profile.min()),
        "position_peak": float((smooth.argmax() + 2.5) / PLACES),
        "below_half": float(pieces[pieces < window // 2].sum() / pieces.sum()),
        "full_windows": float((pieces == window).sum() * window / pieces.sum()),
        "profile": profile.tolist(),
    }
