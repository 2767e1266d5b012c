"""The corpus of a run, where it meets planner and model."""

from __future__ import annotations

from pathlib import Path

from wlb_titan.config.settings import CorpusSettings, SourceSettings
from wlb_titan.corpus import Corpus
from wlb_titan.documents.mixture import Source
from wlb_titan.errors import PlanError


def open_corpus(settings: CorpusSettings) -> Corpus:
    """Open what [wlb.corpus] names: a corpus, or all those of a mixture.

    Raises:
        CorpusError: as `Corpus.open` and `Corpus.joined`.
    """
    if not settings.sources:
        return open_source(settings, settings.tokenizer)
    return Corpus.joined([open_source(source, settings.tokenizer) for source in settings.sources])


def open_source(source: CorpusSettings | SourceSettings, tokenizer: str) -> Corpus:
    """Open one corpus, by itself or of a mixture."""
    return Corpus.open(source.path, column=source.column, tokenizer=tokenizer, mask=source.mask)


def mixture_sources(settings: CorpusSettings, corpus: Corpus) -> list[Source]:
    """The parts of the corpus as the planner mixes them; none if it is one corpus.

    Args:
        settings: [wlb.corpus].
        corpus: what `open_corpus` made of them.

    Raises:
        PlanError: two sources have one name, or a weight or share is out of range.
    """
    names = [source.name or Path(source.path).name for source in settings.sources]
    if len(set(names)) < len(names):
        raise PlanError(
            f"The sources are called {', '.join(names)}, and metrics tell them apart by name; give each a "
            "`name` of its own."
        )
    return [
        Source(
            name=name,
            documents=len(part),
            weight=source.weight,
            long_length=source.long_length,
            long_share=source.long_share,
        )
        for name, source, part in zip(names, settings.sources, corpus.parts, strict=True)
    ]
