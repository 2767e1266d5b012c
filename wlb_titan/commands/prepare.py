"""`wlb-titan prepare`: turn text into a corpus on disk, with progress and a summary at the end."""

import os
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.text import Text

from wlb_titan.commands.command_line import NUMBER, POSITIVE, Place, progress, say, show_table
from wlb_titan.corpus.corpus import PREPARATION_FILE, UNREADABLE_FILE, Corpus, open_tokenizer
from wlb_titan.prepare.prepare import PrepareSettings, prepare_corpus
from wlb_titan.prepare.sources import SOURCES
from wlb_titan.prepare.tokenizer import DEFAULT_VOCAB_SIZE, MIN_VOCAB_SIZE

BAR_WIDTH = 24
SAMPLE_TOKENS = 400
MOST_VOCAB_SIZE = 1 << 22


@click.command()
@click.argument("output", type=Place(path_type=Path, file_okay=False))
@click.option(
    "--source",
    default="python-source",
    show_default=True,
    help=f"Where the text comes from: {SOURCES}. The default takes all Python files installed here.",
)
@click.option(
    "--tokenizer",
    metavar="DIR",
    help="Folder of a Hugging Face tokenizer.  [default: train a byte-level BPE on this corpus]",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(MIN_VOCAB_SIZE, MOST_VOCAB_SIZE),
    help=f"Maximum vocabulary size of the tokenizer to train.  [default: {DEFAULT_VOCAB_SIZE}]",
)
@click.option("--bos", is_flag=True, help="Begin each document with the bos_token of --tokenizer.")
@click.option("--seed", type=NUMBER, default=0, show_default=True, help="Seed of the documents' order.")
@click.option(
    "--max-tokens",
    type=POSITIVE,
    help="Stop after the document that reaches this number of tokens.  [default: take all documents]",
)
@click.option(
    "--chat",
    is_flag=True,
    help="Read records as conversations (field `messages`), render them by the tokenizer's template, and "
    "learn what the assistant says.",
)
@click.option("--chat-template", metavar="FILE", help="With --chat: another Jinja template.")
@click.option(
    "--max-length",
    type=click.IntRange(min=2),
    help="With --chat: leave out conversations with more tokens, and count them.  [default: none]",
)
@click.option("--today", metavar="YYYY-MM-DD", help="With --chat: the date, for templates that write it.")
def prepare(output: Path, **options: Any) -> None:
    """Turn text into the corpus OUTPUT: a folder of shuffled, tokenized documents.

    The corpus appears only when it is complete. If the command is interrupted, run it again. If the corpus
    exists already, the command does nothing.
    """
    settings = PrepareSettings(**options)
    existed = os.path.exists(output / PREPARATION_FILE)
    with progress() as report:
        corpus = prepare_corpus(settings, output, report=report)
    if existed:
        counts = f"{len(corpus):,} documents, {corpus.lengths.sum():,} tokens"
        click.echo(f"{corpus.path} already exists, made with the same settings: {counts}.")
        return
    show_summary(corpus)
    if settings.chat:
        show_sample(corpus)


def show_summary(corpus: Corpus) -> None:
    about = corpus.preparation
    assert about is not None
    lengths = np.asarray(corpus.lengths)
    show_table(length_rows(lengths))
    longest = int(lengths.argmax())
    lines = {
        "corpus": str(corpus.path),
        "fingerprint": corpus.fingerprint,
        "documents": f"{about.documents:,}",
        "tokens": f"{about.tokens:,}",
        "longest": f"{lengths[longest]:,} tokens, {corpus.source(longest)}",
        "vocabulary": f"{about.vocab_size:,} entries; {about.end_of_text} ends each document",
        "left out": f"{about.empty_documents:,} empty documents, {about.unreadable:,} unreadable ones",
    }
    if (learned := about.learned_tokens) is not None:
        lines["learned"] = f"{learned:,} tokens, {learned / about.tokens:.1%} of all"
        lines["left out"] = (
            f"{about.long_documents:,} conversations that are too long, {about.unlearned_documents:,} that "
            "teach nothing"
        )
        lines["vocabulary"] = f"{about.vocab_size:,} entries"
    if about.unreadable:
        lines["why"] = str(corpus.path / UNREADABLE_FILE)
    say(*(f"{name:>12}  {value}" for name, value in lines.items()))


def length_rows(lengths: np.ndarray) -> list[dict[str, str]]:
    """A row for each power of two from the shortest document's to the longest's; no length may be 0."""
    powers = np.frexp(lengths)[1] - 1  # floor(log2), exact below 2^53
    least = int(powers.min())
    documents, tokens = np.bincount(powers - least), np.bincount(powers - least, lengths)
    bars = np.round(BAR_WIDTH * tokens / tokens.max()).astype(int)
    return [
        {
            "length": f"{1 << least + place:,}+",
            "documents": f"{documents[place]:,}",
            "tokens": f"{tokens[place]:,.0f}",
            "share": f"{tokens[place] / tokens.sum():.1%}",
            "": "█" * bars[place],
        }
        for place in range(len(documents))
    ]


def show_sample(corpus: Corpus) -> None:
    """Prints the first tokens of a conversation: the learned ones in green, or between brackets where there
    are no colours."""
    tokenizer = open_tokenizer(corpus.tokenizer_path).backend_tokenizer
    length = min(int(corpus.lengths[0]), SAMPLE_TOKENS)
    tokens, learned = corpus.tokens(0, 0, length).tolist(), corpus.learned(0, 0, length).tolist()
    console, text = Console(highlight=False), Text()
    colours = console.is_terminal and not console.no_color
    how = "green" if colours else "in brackets"
    say(f"\nThe beginning of {corpus.source(0)}; what is learned is {how}:\n")
    for on, run in groupby(zip(learned, tokens, strict=True), key=itemgetter(0)):
        piece = tokenizer.decode([token for _, token in run], skip_special_tokens=False)
        marked = piece if colours or not on else f"[{piece}]"
        text.append(marked, style="bold green" if on else "dim")
    console.print(text, soft_wrap=True)
