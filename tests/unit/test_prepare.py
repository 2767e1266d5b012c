"""Preparing a corpus as a whole: what is made, what is left alone, what remains of an interrupted one."""

import errno
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from commands import invoke
from corpora import content, decode
from forking import await_, command
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from wlb_titan.corpus import Corpus, CorpusError
from wlb_titan.corpus.corpus import partial_folder
from wlb_titan.prepare.prepare import (
    DOCUMENTS_FILE,
    PrepareSettings,
    long_tailed_lengths,
    prepare_corpus,
    written_whole,
)
from wlb_titan.prepare.tokenizer import CorpusTokenizer

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


def test_the_corpus_holds_every_text_once_in_shuffled_order(made):
    tokenizer = CorpusTokenizer(made.tokenizer_path)
    rows = range(len(made))
    found = {made.source(row): decode(made.tokenizer_path, made.tokens(row)[:-1]) for row in rows}
    assert found == FILES
    assert list(found) != sorted(found), "not shuffled"
    assert {made.tokens(row)[-1] for row in rows} == {tokenizer.end_of_text_id}
    noted = made.preparation
    assert (noted.empty_documents, noted.unreadable, noted.learned_tokens) == (1, 1, None)
    assert (noted.vocab_size, noted.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
    unreadable = (made.path / "unreadable.txt").read_text()
    assert unreadable == "picture.png: not UTF-8: invalid start byte at byte 0\n"
    files = ["corpus.json", DOCUMENTS_FILE, "dataset_info.json", "state.json", "tokenizer", "unreadable.txt"]
    assert sorted(os.listdir(made.path)) == files and os.listdir(made.path.parent) == ["corpus"]


def test_the_same_settings_give_the_same_bytes(settings, made, tmp_path):
    again = prepare_corpus(settings, tmp_path / "again")
    for file in filter(Path.is_file, made.path.rglob("*")):
        assert (again.path / file.relative_to(made.path)).read_bytes() == file.read_bytes(), file.name


def test_seed_and_texts_make_another_corpus(made, texts, tmp_path):
    with_tokenizer = PrepareSettings(source=f"text:{texts}", tokenizer=str(made.tokenizer_path), seed=1)
    other = prepare_corpus(with_tokenizer, tmp_path / "other")
    assert content(other) != content(made)
    assert sorted(content(other)) == sorted(content(made))
    altered = shutil.copytree(texts, tmp_path / "texts")
    (altered / "00.txt").write_text("other text")
    changed = prepare_corpus(replace(with_tokenizer, source=f"text:{altered}", seed=0), tmp_path / "corpus")
    assert len({made.fingerprint, other.fingerprint, changed.fingerprint}) == 3
    assert other.tokenizer.sha256 == made.tokenizer.sha256


def test_max_tokens_takes_the_first_documents_of_the_same_order(settings, made, tmp_path):
    bound = int(made.lengths[:10].sum()) - 3
    part = prepare_corpus(replace(settings, max_tokens=bound), tmp_path / "part")
    assert content(part) == content(made)[:10]


@pytest.fixture(scope="module")
def beginning(made, tmp_path_factory) -> Path:
    """The corpus' tokenizer with a token that it puts in front of texts."""
    folder = tmp_path_factory.mktemp("beginning") / "tokenizer"
    shutil.copytree(made.tokenizer_path, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|begin|>"])
    token = "<|begin|>", tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[token])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|begin|>"}))
    return folder


def test_documents_begin_as_the_tokenizer_begins_texts_or_the_command_warns(made, texts, beginning, tmp_path):
    settings = PrepareSettings(source=f"text:{texts}", tokenizer=str(beginning))
    with pytest.warns(UserWarning, match="prepare the corpus with --bos"):
        plain = prepare_corpus(settings, tmp_path / "plain")
    corpus = prepare_corpus(replace(settings, bos=True), tmp_path / "corpus")
    begin = CorpusTokenizer(beginning).special_ids()["bos_token_id"]
    tokens = [corpus.tokens(row).tolist() for row in range(len(corpus))]
    assert tokens == [[begin, *plain.tokens(row)] for row in range(len(plain))]
    with pytest.raises(CorpusError, match="bos is True there, and False was asked for"):
        prepare_corpus(settings, tmp_path / "corpus")


def test_a_token_that_begins_documents_must_be_the_tokenizers(made, texts, tmp_path):
    with pytest.raises(CorpusError, match=r"--bos: the tokenizer_config\.json .* names no bos_token"):
        own = {"tokenizer": str(made.tokenizer_path), "bos": True}
        prepare_corpus(PrepareSettings(source=f"text:{texts}", **own), tmp_path / "a")
    with pytest.raises(CorpusError, match="--bos is for the text of a --tokenizer"):
        PrepareSettings(source=f"text:{texts}", bos=True)


def test_a_corpus_of_the_version_before_settings_came_is_taken_for_what_it_is(settings, made, tmp_path):
    path = tmp_path / "corpus"
    shutil.copytree(made.path, path)
    noted = json.loads((path / "corpus.json").read_text())
    del noted["settings"]["bos"]
    (path / "corpus.json").write_text(json.dumps(noted))
    assert prepare_corpus(settings, path).fingerprint == made.fingerprint


def test_a_source_without_text(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a").write_text("\n\n")
    (tmp_path / "texts" / "b").write_bytes(b"\xff")
    message = r"1 documents are empty, 0 too long and 1 cannot be read \(the first: b: not UTF-8"
    with pytest.raises(CorpusError, match=message):
        prepare_corpus(PrepareSettings(source=f"text:{tmp_path}/texts"), tmp_path / "corpus")
    assert os.listdir(tmp_path) == ["texts"], "something was left behind"


# What already lies at the place, which is never replaced.


def test_a_complete_corpus_is_left_alone_and_other_settings_are_named(settings, made):
    again = prepare_corpus(settings, made.path, report=lambda *_: pytest.fail("work was done"))
    assert again.fingerprint == made.fingerprint
    message = "vocab_size is 300 there, and 280 was asked for; seed is 0 there, and 5 was asked for. Delete"
    with pytest.raises(CorpusError, match=message):
        prepare_corpus(replace(settings, vocab_size=280, seed=5), made.path)


def test_a_tokenizer_that_was_edited_is_another_setting(made, texts, tmp_path):
    tokenizer = shutil.copytree(made.tokenizer_path, tmp_path / "tokenizer")
    own = PrepareSettings(source=f"text:{texts}", tokenizer=str(tokenizer))
    prepare_corpus(own, tmp_path / "corpus")
    (tokenizer / "chat_template.jinja").write_text("{{ messages }}")
    config = tokenizer / "tokenizer_config.json"
    config.write_text(config.read_text() + "\n")
    changed = r"tokenizer_config.json was another .*chat_template.jinja was another file then. Delete"
    with pytest.raises(CorpusError, match=changed):
        prepare_corpus(own, tmp_path / "corpus")


@pytest.mark.parametrize("there", ["corpus/notes.txt", "corpus", ".corpus.partial"])
def test_places_with_anything_else_are_refused_and_never_touched(settings, tmp_path, there):
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).write_text("mine")
    refusal = "cannot be written: " if there == ".corpus.partial" else "already exists and is not a corpus"
    with pytest.raises(CorpusError, match=refusal):
        prepare_corpus(settings, tmp_path / "corpus")
    assert (tmp_path / there).read_text() == "mine"


def test_a_link_that_stands_for_the_corpus_stays_one(settings, tmp_path):
    (tmp_path / "disk" / "corpus").mkdir(parents=True)  # empty, which is filled
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "corpus")
    for _ in range(2):
        assert prepare_corpus(settings, tmp_path / "link").path == tmp_path / "disk" / "corpus"
    assert os.listdir(tmp_path / "disk") == ["corpus"]
    assert (tmp_path / "link").is_symlink()


def test_a_file_system_without_locks_is_written(settings, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert len(prepare_corpus(settings, tmp_path / "corpus")) == len(FILES)


def test_a_folder_that_appeared_meanwhile_is_kept(tmp_path):
    with pytest.raises(OSError, match="not empty"), written_whole(tmp_path / "a") as folder:
        (folder / "file").write_text("mine")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "file").write_text("theirs")
    assert (tmp_path / "a" / "file").read_text() == "theirs"


# The command, in this process and killed in another.


def test_the_command_prints_a_summary_and_is_quick_the_second_time(texts, tmp_path, on_terminal):
    arguments = (tmp_path / "corpus", "--source", f"text:{texts}", "--vocab-size", 300)
    result = invoke("prepare", *arguments)
    assert result.exit_code == 0 and not result.stderr, result.output
    stdout, shown = on_terminal("prepare", tmp_path / "again", *arguments[1:])
    assert stdout.replace("again", "corpus") == result.stdout and shown == {"Tokenizing documents"}
    corpus = Corpus.open(tmp_path / "corpus")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert f"fingerprint {corpus.fingerprint}" in lines
    assert f"tokens {corpus.preparation.tokens:,}" in lines
    assert "left out 1 empty documents, 1 unreadable ones" in lines
    assert f"why {corpus.path}/unreadable.txt" in lines
    assert any("█" in line for line in lines)

    result = invoke("prepare", *arguments)
    assert result.exit_code == 0
    assert "already exists, made with the same settings: 40 documents" in result.stdout
    assert result.stderr == ""


@pytest.fixture
def preparing(tmp_path):
    """A process that prepares a large corpus, when it begins to tokenize it."""
    output = tmp_path / "corpus"
    process = command("wlb_titan.commands.main", "prepare", output, "--vocab-size", 300)
    documents = partial_folder(output) / "corpus" / DOCUMENTS_FILE
    await_(lambda: documents.exists() or process.poll() is not None, lambda: "it did not begin", 180)
    yield process
    process.kill()
    process.communicate()


def test_ctrl_c_ends_cleanly(preparing, tmp_path):
    preparing.send_signal(signal.SIGINT)
    output, _ = preparing.communicate(timeout=180)
    assert preparing.returncode == 130, output
    assert output.endswith("\nInterrupted.\n")
    assert "Traceback" not in output
    assert os.listdir(tmp_path) == []


@pytest.mark.long
def test_a_killed_preparation_is_never_taken_for_a_corpus(preparing, settings, tmp_path):
    output = tmp_path / "corpus"
    with pytest.raises(CorpusError, match="Another process is preparing"):
        prepare_corpus(settings, output)
    preparing.kill()
    preparing.wait()
    assert partial_folder(output).exists()
    with pytest.raises(CorpusError, match="was interrupted, or is still running"):
        Corpus.open(output)

    assert len(prepare_corpus(settings, output)) == len(FILES)
    assert not partial_folder(output).exists()


def test_synthetic_lengths_have_a_long_tail():
    lengths = long_tailed_lengths(10_000_000, 65536)
    assert 10_000_000 <= lengths.sum() < 10_000_000 + 65536
    assert lengths.min() >= 1 and lengths.max() == 65536
    assert 0.005 < (lengths == 65536).mean() < 0.02
    assert (lengths == long_tailed_lengths(10_000_000, 65536)).all()
