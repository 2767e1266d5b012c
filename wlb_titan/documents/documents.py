"""The documents that a job trains on, as far as planning is concerned: their lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wlb_titan.arrays import Ints
from wlb_titan.documents.mixture import Lengths, Mixture, Source, count_longer


def all_learned(rows: Ints, starts: Ints, stops: Ints) -> Ints:
    """`Documents.learned` where there is no label mask."""
    return stops - starts


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """A corpus, or several mixed.

    Attributes:
        lengths: tokens of every corpus row: an int64 array (documents,), or what looks them up.
        name: where they come from, for reports.
        sources: what the rows belong to, and their shares; none is one source of all.
        seed: seed of the epochs' orders; None reads the corpus in its own order.
        learned: how many tokens of pieces are to be learned, int64 (n,), of their corpus rows, first tokens
            and the tokens after their last ones, int64 (n,) each.
        fingerprint: names the content; a planner's state goes on only with the one it was saved with.
    """

    lengths: Lengths
    name: str = ""
    sources: tuple[Source, ...] = ()
    seed: int | None = 0
    learned: Callable[[Ints, Ints, Ints], Ints] = all_learned
    fingerprint: str = ""

    def mixture(self) -> Mixture:
        """The order in which they are read."""
        return Mixture(self.lengths, self.sources, seed=self.seed)

    def sample(self) -> Ints:
        """int64 (n,), lengths as they come in the stream; of all if they are few."""
        return self.mixture().sample()

    def describe(self, window: int, tokens: int) -> list[str]:
        """A sentence on the corpus, and of a mixture one on each source."""
        mixture = self.mixture()
        long = count_longer(self.lengths, window)
        cut = f", {long:,} of them longer than the window and cut" if long else ""
        head = f"{self.name}: {mixture.filled:,} documents, {mixture.tokens:,} tokens{cut}."
        return [head, *mixture.describe(tokens)]
