"""Document lengths without a corpus: from a text file, one per line, or from a named distribution.

Most of these are log-normal, as most collections nearly are: exp(normal(log median, sigma)), whole tokens, at
least MINIMUM. Two are histograms. docs/simulator.md says where the numbers come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.errors import PlanError, refusing, regular_file

LONGEST = 2**40  # tokens; anything above is a slip of the pen, and sums stay far from overflow
MINIMUM = 16
DRAWN = 1 << 18  # documents of a named distribution


@dataclass(frozen=True, slots=True)
class LogNormal:
    median: float
    sigma: float  # standard deviation of the natural logarithm
    source: str  # for reports

    def draw(self, documents: int = DRAWN, seed: int = 1) -> Ints:
        """int64 (documents,), tokens."""
        rng = np.random.default_rng(seed)
        lengths = np.exp(rng.normal(np.log(self.median), self.sigma, documents))
        return np.maximum(lengths.astype(np.int64), MINIMUM)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Documents counted by length, spread evenly within each bin."""

    bins: dict[int, int]  # shortest length of each bin -> its documents, ascending
    longest: int  # tokens of the longest document, in the last bin
    median: float  # tokens, of the counted documents
    source: str  # for reports

    def draw(self, documents: int = DRAWN, seed: int = 1) -> Ints:
        """int64 (documents,), evenly spaced quantiles, shuffled: even rare bins have their share."""
        quantiles = (np.random.default_rng(seed).permutation(documents) + 0.5) / documents
        below = np.cumsum([0, *self.bins.values()]) / sum(self.bins.values())
        return np.interp(quantiles, below, [*self.bins, self.longest + 1]).astype(np.int64)


_WLBLLM = {
    1: 221, 16: 270, 32: 510, 64: 965, 128: 2008, 256: 3902, 512: 7998, 1024: 15705, 2048: 15688,
    3072: 16113, 4096: 15655, 5120: 16049, 6144: 2074, 8192: 786, 12288: 245, 16384: 303, 24576: 146,
    32768: 216, 49152: 137, 65536: 318, 98304: 210,
}  # fmt: skip
_PROLONG = {
    512: 11641, 1024: 29949, 2048: 13497, 3072: 7514, 4096: 4750, 5120: 3045, 6144: 3438, 8192: 2535,
    12288: 795, 16384: 460, 24576: 147, 32768: 90, 49152: 24, 65536: 20, 98304: 10, 131072: 17,
}  # fmt: skip

NAMED: dict[str, LogNormal | Histogram] = {
    "web": LogNormal(459, 1.5, "web pages as in RedPajama-V2"),
    "code": LogNormal(1580, 1.37, "Python files"),
    "chat": LogNormal(700, 1.1, "made-up conversations"),
    "paper": LogNormal(2000, 1.6, "as the WLB-LLM paper describes its training data"),
    "wlbllm": Histogram(_WLBLLM, 124913, 3227, "lengths in DistCA's dist_wlbllm.json"),
    "prolong": Histogram(_PROLONG, 340149, 1914, "lengths in DistCA's dist_prolong.json"),
}


def named_or_read(text: str) -> tuple[Ints, str]:
    """Lengths, int64 (documents,), of a key of NAMED or a file, and their description for reports."""
    if text in NAMED:
        named = NAMED[text]
        return named.draw(), f"{text} ({named.source}; median {named.median:,.0f} tokens)"
    path = Path(text)
    if not text or not path.exists():
        raise PlanError(f"{text!r} is neither a distribution of lengths ({', '.join(NAMED)}) nor a file.")
    what = f"The file of lengths {path}"
    wanted = "it must have a document's length a line, as a whole number of tokens from 1 to 2^40"
    with refusing(lambda reason: PlanError(f"{what} cannot be read ({reason}); {wanted}.")):
        words = regular_file(path).read_text(encoding="utf-8").split()
        if strange := next((word for word in words if not (word.isascii() and word.isdigit())), None):
            raise ValueError(f"it has {strange!r}")
        lengths: Ints = np.array(words, dtype=np.int64)
    if not len(lengths) or lengths.min() < 1 or lengths.max() > LONGEST:
        found = f"has {lengths.min()} to {lengths.max()}" if len(lengths) else "is empty"
        raise PlanError(f"{what} {found}; {wanted}.")
    return lengths, path.name
