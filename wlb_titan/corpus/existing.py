"""What lies at the place where a corpus shall be made: nothing, the same corpus, or something else."""

import re
from pathlib import Path

from wlb_titan.corpus.corpus import Corpus
from wlb_titan.corpus.folder import LOCK_FILE
from wlb_titan.corpus.manifest import DOCUMENTS_FILE, MANIFEST_FILE, TOKENIZER_FOLDER, UNREADABLE_FILE
from wlb_titan.corpus.settings import PrepareSettings
from wlb_titan.errors import CorpusError

PART_FILES = r"documents-\d+\.arrow"
CORPUS_ENTRIES = {DOCUMENTS_FILE, TOKENIZER_FOLDER, UNREADABLE_FILE, MANIFEST_FILE, LOCK_FILE}


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
        f"{name} is {found.get(name)!r} there, and {value!r} was asked for"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
    if differences:
        raise CorpusError(
            f"{output} holds a corpus that was made with other settings: {'; '.join(differences)}. "
            "Add --overwrite to replace it, or name another folder."
        )
    return corpus


def check_replaceable(output: Path) -> None:
    """Make sure that nothing but a corpus would be lost with `output`.

    Raises:
        CorpusError: `output` is a file, or a folder with files that are no part of a corpus.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise CorpusError(f"{output} is a file; name a folder for the corpus.")
    names = sorted(entry.name for entry in output.iterdir())
    strangers = [name for name in names if name not in CORPUS_ENTRIES and not re.fullmatch(PART_FILES, name)]
    if strangers:
        raise CorpusError(
            f"{output} holds files that are no part of a corpus (such as {strangers[0]}) and will not be "
            "touched; name another folder."
        )
