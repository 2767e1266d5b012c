"""Preparing a corpus as a whole: what is made, what is left alone, what remains of an interrupted one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer

from wlb_titan.commands.main import main
from wlb_titan.corpus import Corpus, CorpusError
from wlb_titan.corpus.folder import partial_folder, written_whole
from wlb_titan.corpus.prepare import PrepareSettings, prepare_corpus

pytestmark = pytest.mark.slow

FILES = {f"{number:02}.txt": f"Document {number} says {'la ' * number}.\n" for number in range(40)}


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "empty.txt").write_text(" \n")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff")
    return folder


@pytest.fixture(scope="module")
def settings(texts) -> PrepareSettings:
    return PrepareSettings(source=f"text:{texts}", vocab_size=300)


@pytest.fixture(scope="module")
def made(settings, tmp_path_factory) -> Corpus:
    """A corpus that nobody writes to."""
    return prepare_corpus(settings, tmp_path_factory.mktemp("made") / "new" / "corpus")


@pytest.fixture
def copy(made, tmp_path) -> Corpus:
    return Corpus.open(shutil.copytree(made.path, tmp_path / "corpus"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["prepare", *map(str, arguments)])


def content(corpus: Corpus) -> list[list[int]]:
    return [corpus.tokens(row).tolist() for row in range(len(corpus))]


def test_the_corpus_holds_every_text_once_in_shuffled_order(made):
    tokenizer = Tokenizer.from_file(str(made.tokenizer_path / "tokenizer.json"))
    rows = range(len(made))
    found = {made.source(row): tokenizer.decode(made.tokens(row)[:-1].tolist()) for row in rows}
    assert found == FILES
    assert list(found) != sorted(found), "not shuffled"
    assert {made.tokens(row)[-1] for row in rows} == {made.manifest.end_of_text_id}
    assert (made.manifest.empty_documents, made.manifest.unreadable) == (1, 1)
    unreadable = (made.path / "unreadable.txt").read_text()
    assert unreadable == "picture.png: not UTF-8: invalid start byte at byte 0\n"
    files = ["documents.arrow", "manifest.json", "tokenizer", "unreadable.txt"]
    assert sorted(os.listdir(made.path)) == files and os.listdir(made.path.parent) == ["corpus"]


def test_the_same_settings_give_the_same_bytes(settings, made, tmp_path):
    again = prepare_corpus(settings, tmp_path / "again")
    assert again.manifest == made.manifest
    assert (again.path / "documents.arrow").read_bytes() == (made.path / "documents.arrow").read_bytes()


def test_seed_and_texts_make_another_corpus(made, texts, tmp_path):
    with_tokenizer = PrepareSettings(source=f"text:{texts}", tokenizer=str(made.tokenizer_path), seed=1)
    other = prepare_corpus(with_tokenizer, tmp_path / "other")
    assert content(other) != content(made)
    assert sorted(content(other)) == sorted(content(made))
    altered = shutil.copytree(texts, tmp_path / "texts")
    (altered / "00.txt").write_text("other text")
    changed = prepare_corpus(replace(with_tokenizer, source=f"text:{altered}", seed=0), tmp_path / "corpus")
    assert len({made.fingerprint, other.fingerprint, changed.fingerprint}) == 3
    assert other.manifest.tokenizer_sha256 == made.manifest.tokenizer_sha256


def test_max_tokens_takes_the_first_documents_of_the_same_order(settings, made, tmp_path):
    bound = int(made.lengths[:10].sum()) - 3
    part = prepare_corpus(replace(settings, max_tokens=bound), tmp_path / "part")
    assert content(part) == content(made)[:10]
    assert part.manifest.tokens >= bound


def test_progress_is_reported_up_to_the_end(settings, tmp_path):
    reports = []
    prepare_corpus(settings, tmp_path / "corpus", report=lambda *report: reports.append(report))
    before = [what for what, _, total in reports if not total]
    assert before == ["Finding documents", "Preparing the tokenizer"]
    done = [done for _, done, total in reports if total == len(FILES) + 2]
    assert len(set(done)) == len(FILES)
    assert done == sorted(done)


def test_a_source_without_text(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a").write_text("\n\n")
    (tmp_path / "texts" / "b").write_bytes(b"\xff")
    message = r"1 documents are empty, 0 too long and 1 cannot be read \(the first: b: not UTF-8"
    with pytest.raises(CorpusError, match=message):
        prepare_corpus(PrepareSettings(source=f"text:{tmp_path}/texts"), tmp_path / "corpus")
    assert os.listdir(tmp_path) == ["texts"], "something was left behind"


def test_a_place_that_cannot_be_written(settings, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CorpusError, match="corpus cannot be written: "):
        prepare_corpus(settings, tmp_path / "file" / "corpus")


# What already lies at the place.


def test_a_complete_corpus_is_left_alone(settings, copy):
    before = os.stat(copy.path / "documents.arrow")
    again = prepare_corpus(settings, copy.path, report=lambda *_: pytest.fail("work was done"))
    assert again.manifest == copy.manifest
    assert os.stat(again.path / "documents.arrow") == before


def test_other_settings_need_overwrite(settings, copy, tmp_path):
    other = replace(settings, vocab_size=280, seed=5)
    message = "vocab_size is 300 there, and 280 was asked for; seed is 0 there, and 5 was asked for. Add"
    with pytest.raises(CorpusError, match=message):
        prepare_corpus(other, copy.path)
    assert Corpus.open(copy.path).manifest == copy.manifest

    mapped = copy.tokens(0)
    kept = mapped.tolist()
    replaced = prepare_corpus(other, copy.path, overwrite=True)
    assert replaced.manifest.vocab_size == 280
    assert mapped.tolist() == kept, "a corpus in use must not change under its reader"
    assert os.listdir(tmp_path) == ["corpus"]


def test_a_tokenizer_that_was_edited_is_another_setting(made, texts, tmp_path):
    tokenizer = shutil.copytree(made.tokenizer_path, tmp_path / "tokenizer")
    own = PrepareSettings(source=f"text:{texts}", tokenizer=str(tokenizer))
    prepare_corpus(own, tmp_path / "corpus")
    (tokenizer / "chat_template.jinja").write_text("{{ messages }}")
    config = tokenizer / "tokenizer_config.json"
    config.write_text(config.read_text() + "\n")
    changed = r"chat_template.jinja was .*_config.json was another file then. Add"
    with pytest.raises(CorpusError, match=changed):
        prepare_corpus(own, tmp_path / "corpus")


def test_a_failed_overwrite_keeps_the_old_corpus(copy):
    with pytest.raises(CorpusError, match="needs a folder"):
        prepare_corpus(PrepareSettings(source="text:/nowhere/at/all"), copy.path, overwrite=True)
    assert Corpus.open(copy.path).manifest == copy.manifest


def test_a_damaged_corpus_needs_overwrite(settings, copy):
    (copy.path / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"tokenizer.json .*--overwrite"):
        prepare_corpus(settings, copy.path)
    assert len(prepare_corpus(settings, copy.path, overwrite=True)) == len(FILES)


def test_a_manifest_that_lists_a_file_outside_deletes_nothing_there(settings, copy, tmp_path):
    (tmp_path / "mine").write_text("mine")
    listed = {**copy.manifest.files, "../mine": 4, str(tmp_path / "mine"): 4}
    replace(copy.manifest, files=listed).save(copy.path)
    prepare_corpus(settings, copy.path, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["corpus", "mine"]


@pytest.mark.parametrize(
    ("there", "stranger"),
    [
        ("corpus/notes.txt", "such as notes.txt"),
        ("corpus/tokenizer/notes.txt", "such as tokenizer/notes.txt"),
        ("corpus/empty/", "such as empty/"),
        ("corpus/link@", r"such as link \(a link\)"),
        ("corpus", "is a file"),
        (".corpus.partial/notes.txt", "not what a preparation leaves behind"),
        (".corpus.partial@", "not what a preparation leaves behind"),
        (".corpus.partial", "not what a preparation leaves behind"),
        (".corpus.replaced/", "corpus.replaced is in the way"),
    ],
)
@pytest.mark.parametrize("complete", [False, True], ids=["alone", "beside a corpus"])
def test_places_with_anything_else_are_refused_and_never_touched(
    settings, made, tmp_path, there, stranger, complete
):
    """A name with / behind it is a folder, with @ a link."""
    if complete and there != "corpus":
        shutil.copytree(made.path, tmp_path / "corpus")
    place = tmp_path / there.rstrip("/@")
    place.parent.mkdir(parents=True, exist_ok=True)
    if there.endswith("@"):
        place.symlink_to(made.path)
    elif there.endswith("/"):
        place.mkdir()
    else:
        place.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for overwrite in (True, False) if there.startswith("corpus") else (True,):
        with pytest.raises(CorpusError, match=stranger):
            prepare_corpus(replace(settings, seed=9), tmp_path / "corpus", overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before
    assert len(Corpus.open(made.path)) == len(FILES)


def test_a_link_that_stands_for_the_corpus_stays_one(settings, tmp_path):
    (tmp_path / "disk" / "corpus").mkdir(parents=True)  # empty, which is filled
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "corpus")
    for overwrite in (False, True):
        found = prepare_corpus(settings, tmp_path / "link", overwrite=overwrite)
        assert found.path == tmp_path / "disk" / "corpus"
    assert os.listdir(tmp_path / "disk") == ["corpus"]
    assert (tmp_path / "link").is_symlink()


# Written whole or not at all.


def test_what_a_killed_writer_left_is_cleared(tmp_path):
    leftover = partial_folder(tmp_path / "a")
    (leftover / "tokenizer").mkdir(parents=True)
    (leftover / "tokenizer" / "tokenizer.json").write_text("half")
    (leftover / ".lock").touch()
    with written_whole(tmp_path / "a", replace=False) as folder:
        assert os.listdir(folder) == [".lock"]


def test_a_folder_that_appeared_meanwhile_is_kept(tmp_path):
    appeared = pytest.raises(CorpusError, match="appeared while it was being prepared")
    with appeared, written_whole(tmp_path / "a", replace=False) as folder:
        (folder / "file").write_text("mine")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "file").write_text("theirs")
    assert (tmp_path / "a" / "file").read_text() == "theirs"


def test_ctrl_c_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self == partial_folder(tmp_path / "a"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), written_whole(tmp_path / "a", replace=True) as folder:
        (folder / "file").write_text("new")
    assert os.listdir(tmp_path) == ["a"]
    assert os.listdir(tmp_path / "a") == []


# The command, in this process and killed in another.


def test_the_command_prints_a_summary_and_is_quick_the_second_time(texts, tmp_path):
    texts = shutil.copytree(texts, tmp_path / "texts")
    for number in range(8):
        (texts / f"{number}.gif").write_bytes(b"\xff")
    arguments = (tmp_path / "corpus", "--source", f"text:{texts}", "--vocab-size", 300)
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    corpus = Corpus.open(tmp_path / "corpus")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert f"fingerprint {corpus.fingerprint}" in lines
    assert f"tokens {corpus.manifest.tokens:,}" in lines
    assert "left out 1 empty documents, 9 unreadable ones" in lines
    assert result.stdout.count(".gif: not UTF-8: invalid start byte at byte 0") == 5, "the first ones"
    assert f"... all in {corpus.path}/unreadable.txt" in lines
    assert any("█" in line for line in lines)

    result = run(*arguments)
    assert result.exit_code == 0
    assert "is there already, made with the same settings: 40 documents" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--source", "data/chat.jsonl#body"], "For this file write jsonl:data/chat.jsonl#body."),
        (["--tokenizer", "/nowhere"], "The tokenizer folder /nowhere has no tokenizer.json"),
        (["--vocab-size", "256"], "Invalid value for '--vocab-size': 256 is not in the range"),
        (["--max-length", "1"], "Invalid value for '--max-length': 1 is not in the range"),
        (["--too-long", "drop"], "Invalid value for '--too-long': 'drop' is not one of"),
    ],
)
def test_mistakes_are_told(tmp_path, options, message):
    result = run(tmp_path / "corpus", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert not (tmp_path / "corpus").exists()


def start_preparing(output: Path) -> subprocess.Popen:
    """A process that prepares a large corpus, when it begins to tokenize it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "wlb_titan.commands.main", "prepare", str(output), "--vocab-size", "300"],
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background processes, such as this test's own, with Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    documents = partial_folder(output) / "documents.arrow"
    deadline = time.monotonic() + 180
    while not documents.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not begin"
        time.sleep(0.05)
    return process


def test_ctrl_c_ends_cleanly(tmp_path):
    process = start_preparing(tmp_path / "corpus")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 130
    assert stderr.endswith("\nInterrupted.\n")
    assert "Traceback" not in stderr
    assert os.listdir(tmp_path) == []


def test_a_killed_preparation_is_never_taken_for_a_corpus(settings, tmp_path):
    output = tmp_path / "corpus"
    process = start_preparing(output)
    try:
        with pytest.raises(CorpusError, match="Another process is preparing"):
            prepare_corpus(settings, output)
    finally:
        process.kill()
        process.communicate(timeout=180)
    assert partial_folder(output).exists()
    with pytest.raises(CorpusError, match="was interrupted, or is still running"):
        Corpus.open(output)

    assert len(prepare_corpus(settings, output)) == len(FILES)
    assert not partial_folder(output).exists()
