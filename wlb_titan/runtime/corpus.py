"""Where corpus, planner and model meet."""

from __future__ import annotations

from pathlib import Path

from wlb_titan.corpus import Corpus
from wlb_titan.corpus.settings import CorpusSettings
from wlb_titan.planner.mixture import Source


def mixture_sources(settings: CorpusSettings, corpus: Corpus) -> list[Source]:
    """The parts of the corpus as the planner mixes them; none if it is one corpus.

    Args:
        settings: [wlb.corpus].
        corpus: what `open_corpus` made of them.
    """
    return [
        Source(
            name=source.name or Path(source.path).name,
            documents=len(part),
            weight=source.weight,
            long_length=source.long_length,
            long_share=source.long_share,
        )
        for source, part in zip(settings.sources, corpus.parts, strict=True)
    ]
