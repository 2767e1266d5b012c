"""Where documents come from: every source, and what is said when there is nothing at its place."""

import json
import os
import sysconfig
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb_titan.corpus.prepare import PrepareSettings
from wlb_titan.corpus.sources import JsonLines, SourceSpec, open_source
from wlb_titan.errors import CorpusError


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder that relative paths start from."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def read_all(here: Path, source: str) -> dict[str, str | list[str]]:
    """Each document's text, or in a list why it cannot be read."""
    opened, found = open_source(SourceSpec.parse(source), here.parent / "cache"), {}
    for number in range(len(opened)):
        try:
            found[opened.name(number)] = opened.read(number)
        except ValueError as error:
            found[opened.name(number)] = [str(error)]
    return found


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("python-source", SourceSpec("python-source")),
        ("text:a dir/b#c", SourceSpec("text", "a dir/b#c")),
        ("jsonl:a.jsonl", SourceSpec("jsonl", "a.jsonl")),
        ("jsonl:a#b.jsonl#body", SourceSpec("jsonl", "a#b.jsonl", "body")),
        ("parquet:a.parquet#body", SourceSpec("parquet", "a.parquet", "body")),
        ("hf:org/name", SourceSpec("hf", "org/name")),
        ("hf:org/name,en@train[:1%]#body", SourceSpec("hf", "org/name", "body", "en", "train[:1%]")),
        ("hf:name@test", SourceSpec("hf", "name", split="test")),
    ],
)
def test_descriptions_are_taken_apart(text, spec):
    assert SourceSpec.parse(text) == spec
    assert SourceSpec.parse(spec.absolute()).absolute() == spec.absolute()


@pytest.mark.parametrize(
    "text",
    ["", "python", "text", "text:", "jsonl:", "jsonl:#a", "jsonl:a#", "hf:", "hf:a#", "hf:,a", "csv:a"],
)
def test_other_descriptions_are_refused(text):
    with pytest.raises(CorpusError, match="is not a source of documents; the sources are python-source"):
        SourceSpec.parse(text)


def test_python_source_has_the_standard_library_and_the_installed_packages(here):
    opened = open_source(SourceSpec("python-source"), here / "cache")
    names = [opened.name(number) for number in range(len(opened))]
    assert len(set(names)) == len(names) > 1000
    number = names.index("stdlib/json/decoder.py")
    expected = Path(sysconfig.get_path("stdlib"), "json", "decoder.py").read_bytes().decode()
    assert opened.read(number) == expected
    assert "site-packages/click/core.py" in names
    assert not [name for name in names if name.startswith("stdlib/site-packages/")]


def test_text_takes_every_readable_file_and_names_the_others(here):
    for folder in ("sub", ".git"):
        (here / folder).mkdir()
    (here / "a.txt").write_bytes("Grüße\r\n".encode())
    (here / "sub" / "no ending").write_text("b")
    (here / "sub" / "latin.md").write_bytes(b"gr\xfc\xdfe")
    (here / "zero.bin").write_bytes(b"a\0b")
    (here / os.fsdecode(b"gr\xfc\xdfe")).write_text("a name that is no UTF-8 is escaped")
    (here / ".git" / "config").write_text("hidden")
    (here / ".hidden").write_text("hidden")
    (here / "broken").symlink_to("nowhere")
    (here / "inside").symlink_to("a.txt")
    (here.parent / "secret").write_text("not to be trained on")
    (here / "outside").symlink_to("../secret")
    os.mkfifo(here / "pipe")
    assert read_all(here, f"text:{here}") == {
        "a.txt": "Grüße\r\n",
        "broken": ["No such file or directory"],
        "gr\\udcfc\\udcdfe": "a name that is no UTF-8 is escaped",
        "inside": "Grüße\r\n",
        "outside": ["a link that leads out of the folder"],
        "pipe": ["a pipe, which would wait for its writer"],
        "sub/latin.md": ["not UTF-8: invalid start byte at byte 2"],
        "sub/no ending": "b",
        "zero.bin": ["not text: it has a zero byte"],
    }


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_text_names_what_permissions_forbid(here):
    (here / "file").write_text("a")
    (here / "folder").mkdir()
    for name in ("file", "folder"):
        (here / name).chmod(0)
    found = read_all(here, "text:.")
    (here / "folder").chmod(0o700)
    assert found == {"file": ["Permission denied"], "folder": ["Permission denied"]}


OTHER_FIELD = "; another field is named after a #, as in --source jsonl:FILE#FIELD"
LINES = {
    '{"body": "eins\\n", "extra": {"a": 1}}': "eins\n",
    '{"body": null, "extra": {"a": "x"}}': "",
    '{"body": "f\u00fcnf"}': "f\u00fcnf",
    '{"body": "a\\u0000b"}': "a\0b",
    json.dumps({"body": "ACGT" * 50_000}): "ACGT" * 50_000,
    '{"extra": 1, "more": 2}': [f"no field 'body'; it has extra, more{OTHER_FIELD}"],
    '{"body": 0}': ["the field 'body' holds int, not text"],
    '{"body": NaN}': ["the field 'body' holds float, not text"],
    '{"body": []}': ["the field 'body' holds list, not text; if these are conversations, add --chat"],
    "[1]": ["not a JSON object"],
    '{"body": "broken': ["Unterminated string"],
    '{"body": "\\ud83d"}': ["surrogates not allowed"],
    '{"body": ' + "9" * 5000 + "}": ["digits"],
    '{"body": ' + "[" * 100_000 + "]" * 100_000 + "}": ["too deeply nested"],
}


def test_jsonl_takes_one_field_and_minds_no_others(here):
    """Blank lines are none; a bad one is no reason to leave out others."""
    (here / "a.jsonl").write_bytes("\r\n \r\n".join(LINES).encode())
    found = read_all(here, "jsonl:a.jsonl#body")
    assert list(found) == [f"a.jsonl:{number}" for number in range(1, 2 * len(LINES), 2)]
    for text, expected in zip(found.values(), LINES.values(), strict=True):
        assert text == expected or (isinstance(text, list) and expected[0] in text[0]), expected


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=20), escape=st.booleans())
def test_jsonl_gives_back_any_text(tmp_path_factory, texts, escape):
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    path.write_bytes("".join(json.dumps({"text": t}, ensure_ascii=escape) + "\n" for t in texts).encode())
    source = JsonLines(path, "text")
    assert [source.read(number) for number in range(len(source))] == texts


def test_parquet(here):
    # As a writer that does not look at its texts leaves them: the last one is not UTF-8.
    texts = pa.StringArray.from_buffers(3, *pa.array([b"one", b"", b"\xff\xfe"]).buffers()[1:])
    pq.write_table(pa.table({"text": texts, "number": [1, 2, 3]}), here / "a.parquet")
    found = read_all(here, "parquet:a.parquet")
    assert (found["a.parquet[0]"], found["a.parquet[1]"]) == ("one", "")
    assert isinstance(found["a.parquet[2]"], list)


def test_hugging_face_dataset_with_split_and_field(here, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(here / "cache"))
    (here / "books").mkdir()
    for split in ("train", "test"):
        texts = pa.table({"body": [f"{split} one", f"{split} two"]})
        pq.write_table(texts, here / "books" / f"{split}.parquet")
    assert list(read_all(here, "hf:./books#body").values()) == ["train one", "train two"]
    assert read_all(here, "hf:./books@test[:1]#body") == {"./books[0]": "test one"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("text:nowhere", "needs a folder, and .*nowhere is none"),
        ("text:empty", "has no files"),
        ("text:a.jsonl", "needs a folder"),
        ("jsonl:nowhere.jsonl", "needs a file, or a folder with files "),
        ("parquet:empty", "needs a file, or a folder with files "),
        ("parquet:a.parquet", "a.parquet has no field 'text'; it has body, number"),
        ("parquet:a.parquet#number", "The field 'number' of a.parquet holds int64, not text"),
        ("parquet:a.jsonl", "Cannot read parquet:a.jsonl: .*[Pp]arquet"),
        ("hf:./empty", "Cannot read hf:./empty: "),
    ],
)
def test_sources_that_cannot_be_used(here, source, message):
    (here / "empty").mkdir()
    (here / "a.jsonl").write_text('{"body": "one", "number": 1}\n')
    pq.write_table(pa.table({"body": ["one"], "number": [1]}), here / "a.parquet")
    with pytest.raises(CorpusError, match=message) as caught:
        read_all(here, source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "t", "vocab_size": 300}, "Leave one of the two out"),
        ({"source": "csv:a"}, "is not a source"),
        ({"max_length": 9}, "are for --chat only"),
        ({"chat": True, "tokenizer": "t"}, "Conversations are records of jsonl:, parquet: or hf:"),
        ({"chat": True, "source": "jsonl:a"}, "template of the model's tokenizer: --tokenizer DIR"),
        ({"chat": True, "source": "jsonl:a", "tokenizer": "t", "too_long": "cut"}, "beyond --max-length"),
    ],
)
def test_settings_that_contradict(options, message):
    with pytest.raises(CorpusError, match=message):
        PrepareSettings(**options)


def test_resolved_settings_mean_the_same_everywhere(here):
    relative = PrepareSettings(source="text:a", tokenizer="t").resolved()
    assert relative == PrepareSettings(source=f"text:{here}/a", tokenizer=f"{here}/t").resolved()
    assert PrepareSettings().resolved() == PrepareSettings(vocab_size=4096).resolved()
    assert PrepareSettings().resolved() != PrepareSettings(vocab_size=4097).resolved()
