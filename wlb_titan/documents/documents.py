"""The documents that a job trains on, as far as planning is concerned: their lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb_titan.documents.mixture import Lengths, Mixture, Source, count_longer


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """A corpus, or several mixed.

    Attributes:
        lengths: tokens of every corpus row: an int64 array (documents,), or what looks them up.
        name: where they come from, for reports.
        sources: what the rows belong to, and their shares; none is one source of all.
        seed: of the epochs' orders; None reads the corpus in its own order.
        fingerprint: names the content; a planner's state goes on only with the one it was saved with.
    """

    lengths: Lengths
    name: str = ""
    sources: tuple[Source, ...] = ()
    seed: int | None = 0
    fingerprint: str = ""

    def mixture(self) -> Mixture:
        """The order in which they are read."""
        return Mixture(self.lengths, self.sources, seed=self.seed)

    def sample(self) -> NDArray[np.int64]:
        """int64 (n,), lengths as they come in the stream; of all if they are few."""
        return self.mixture().sample()

    def describe(self, window: int, tokens: int) -> list[str]:
        """A sentence on the corpus, and of a mixture one on each source.

        Args:
            window: context window in tokens.
            tokens: of a step.
        """
        mixture = self.mixture()
        long = count_longer(self.lengths, window)
        cut = f", {long:,} of them longer than the window and cut" if long else ""
        head = f"{self.name}: {mixture.documents:,} documents, {mixture.tokens:,} tokens{cut}."
        return [head, *mixture.describe(tokens)]
