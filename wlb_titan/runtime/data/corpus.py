"""The corpus of a run, where it meets planner and model."""

from __future__ import annotations

from pathlib import Path

from wlb_titan.config.settings import CorpusSettings, SourceSettings, WlbSettings
from wlb_titan.corpus import Corpus
from wlb_titan.documents import Documents
from wlb_titan.documents.held_out import Divided
from wlb_titan.documents.mixture import Source
from wlb_titan.errors import PlanError


def open_corpus(settings: CorpusSettings) -> Corpus:
    """Open what [wlb.corpus] names: a corpus, or all those of a mixture."""
    if not settings.sources:
        return open_source(settings, settings.tokenizer)
    return Corpus.joined([open_source(source, settings.tokenizer) for source in settings.sources])


def open_source(source: CorpusSettings | SourceSettings, tokenizer: str) -> Corpus:
    """Open one corpus, by itself or of a mixture."""
    return Corpus.open(source.path, column=source.column, tokenizer=tokenizer, mask=source.mask)


def mixture_sources(settings: CorpusSettings, corpus: Corpus) -> list[Source]:
    """The parts of the corpus as the planner mixes them; none if it is one corpus.

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


def documents_of(settings: CorpusSettings, corpus: Corpus, hold_out: float = 0.0) -> Documents:
    """What a planner needs of an opened corpus.

    Args:
        corpus: what `open_corpus` made of them.
        hold_out: share of the documents that is left out, for validation.
    """
    return Documents(
        lengths=Divided(corpus.lengths, hold_out, held_out=False) if hold_out else corpus.lengths,
        name=str(corpus),
        sources=tuple(mixture_sources(settings, corpus)),
        seed=settings.seed,
        learned=corpus.count_learned,
        fingerprint=f"{corpus.fingerprint} without {hold_out}" if hold_out else corpus.fingerprint,
    )


def training_documents(wlb: WlbSettings, corpus: Corpus | None = None) -> Documents:
    """The documents that a job trains on: its corpus without what it holds out."""
    return documents_of(wlb.corpus, corpus or open_corpus(wlb.corpus), wlb.validation.hold_out)
