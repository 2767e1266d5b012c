"""The place where a corpus shall be made: nothing is there, the same corpus, or something else."""

from pathlib import Path

from wlb_titan.corpus.corpus import Corpus
from wlb_titan.corpus.replace import check_replaceable
from wlb_titan.corpus.settings import PrepareSettings
from wlb_titan.errors import CorpusError


def complete_corpus(settings: PrepareSettings, output: Path) -> Corpus | None:
    """The corpus that `output` holds, or None where nothing lies in the way of making one.

    Raises:
        CorpusError: `output` holds a corpus made with other settings, a damaged one, or other files.
    """
    check_replaceable(output)
    if not output.exists() or not any(output.iterdir()):
        return None
    corpus = Corpus.open(output)
    assert corpus.manifest is not None
    wanted, found = settings.resolved(), corpus.manifest.settings
    differences = [
        f"{name} is {found.get(name)!r} there, and {wanted.get(name)!r} was asked for"
        for name in {**wanted, **found}
        if found.get(name) != wanted.get(name)
    ]
    if differences:
        raise CorpusError(
            f"{output} holds a corpus that was made with other settings: {'; '.join(differences)}. "
            "Add --overwrite to replace it, or name another folder."
        )
    return corpus
