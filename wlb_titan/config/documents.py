"""The documents that [wlb.corpus] and [wlb.validation] name, and how many steps an epoch of them is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from wlb_titan.config.settings import CorpusSettings, SourceSettings, WlbSettings
from wlb_titan.corpus import Corpus
from wlb_titan.documents import Documents
from wlb_titan.documents.mixture import HoldOut, Source, all_learned
from wlb_titan.errors import CorpusError, PlanError, UserError
from wlb_titan.job import Job
from wlb_titan.plan import ID, LENGTH


def open_corpus(settings: CorpusSettings, key: str = "wlb.corpus.path") -> Corpus:
    """A corpus, which `key` names, or all those of a mixture."""
    if not settings.sources:
        return open_source(settings, settings.tokenizer, key)
    keys = (f"wlb.corpus.sources.{place}.path" for place in range(len(settings.sources)))
    named = zip(settings.sources, keys, strict=True)
    return Corpus.joined([open_source(source, settings.tokenizer, key) for source, key in named])


def open_source(source: CorpusSettings | SourceSettings, tokenizer: str, key: str) -> Corpus:
    try:
        corpus = Corpus.open(source.path, column=source.column, tokenizer=tokenizer, mask=source.mask)
    except CorpusError as error:
        error.setting = error.setting or key
        raise
    corpus.name = getattr(source, "name", "") or corpus.name
    return corpus


def mixture_sources(settings: CorpusSettings, corpus: Corpus) -> list[Source]:
    """The parts of the corpus as the planner mixes them; none if it is one corpus."""
    names = [part.name for part in corpus.parts]
    if len(set(names)) < len(names):
        raise PlanError(
            f"The sources are called {', '.join(names)}, but metrics tell them apart by name; give each its "
            "own `name`."
        )
    if wrong := next((name for name in names if "/" in name or not name.isprintable()), None):
        raise PlanError(
            f"The name of the source {wrong!r} becomes part of the names of metrics; give it a `name` "
            "without slashes and control characters."
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
    """What a planner needs of an opened corpus, without the share `hold_out` of its documents."""
    return Documents(
        lengths=HoldOut(corpus.lengths, hold_out, held_out=False) if hold_out else corpus.lengths,
        name=str(corpus),
        sources=tuple(mixture_sources(settings, corpus)),
        seed=settings.seed,
        learned=corpus.count_learned if corpus.masked else all_learned,
        fingerprint=f"{corpus.fingerprint} without {hold_out}" if hold_out else corpus.fingerprint,
    )


def training_documents(wlb: WlbSettings, corpus: Corpus | None = None) -> Documents:
    """A job's corpus without what it holds out."""
    return documents_of(wlb.corpus, corpus or open_corpus(wlb.corpus), wlb.validation.hold_out)


def validated_documents(settings: WlbSettings, corpus: Corpus) -> tuple[Corpus, dict[str, Documents]]:
    """The corpus of [wlb.validation], which is opened once beside that of training, or this one; and its
    documents of each source by name, "" where there is one, in their own order."""
    validation = settings.validation
    if validation.path:
        corpus_settings = dataclasses.replace(
            settings.corpus, path=validation.path, mask=validation.mask, sources=[]
        )
        if corpus.validation is None:
            corpus.validation = open_corpus(corpus_settings, "wlb.validation.path")
        other = corpus.validation
        return other, {"": dataclasses.replace(documents_of(corpus_settings, other), seed=None)}
    everything = documents_of(settings.corpus, corpus)
    held_out, first = {}, 0
    counts = [(source.name, source.documents) for source in everything.sources] or [("", len(corpus))]
    for name, count in counts:
        rows = range(first, first + count)
        first += count
        lengths = HoldOut(corpus.lengths, validation.hold_out, held_out=True, rows=rows)
        held_out[name] = dataclasses.replace(everything, lengths=lengths, sources=(), seed=None)
        try:
            held_out[name].mixture()
        except PlanError as error:
            raise UserError(
                f"wlb.validation.hold_out: none of the {count:,} documents of {name or corpus} that have a "
                "token to predict is held out; raise it, or name other documents with wlb.validation.path."
            ) from error
    return corpus, held_out


def steps_of_epochs(
    job: Job, documents: Documents, epochs: int, saved: Mapping[str, Any] | None = None
) -> int:
    """The first step after which every document was trained on `epochs` times; the next epoch fills it up.
    Plans follow from lengths alone, so no tokens are read. `saved`: a planner's state to count on from."""
    planner = job.planner(documents)
    if saved is not None:
        planner.load_state_dict(saved)
    end, steps = epochs * len(documents.lengths), planner.iteration
    missing = planner.left(end)
    while missing > 0:
        plan = planner.next(sharded=())
        trained = plan.documents[plan.documents[:, ID] < end, LENGTH]
        missing -= int(trained.sum()) + plan.lost_tokens
        steps += 1
    return steps
