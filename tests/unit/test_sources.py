"""What each source of documents has."""

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

from wlb_titan.errors import CorpusError
from wlb_titan.prepare.prepare import PrepareSettings
from wlb_titan.prepare.sources import PACKED, SourceSpec, open_source


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


@pytest.mark.parametrize("text", ["python", "text:", "jsonl:#a", "jsonl:a#", "hf:,a", "csv:a", "a.jsonl#b"])
def test_other_descriptions_are_refused(text):
    with pytest.raises(CorpusError, match="is not a source of documents; the sources are python-") as caught:
        SourceSpec.parse(text)
    assert ("For this file write jsonl:a.jsonl#b." in str(caught.value)) == (text == "a.jsonl#b")


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
    assert read_all(here, f"text:{here}") == {
        "a.txt": "Grüße\r\n",
        "broken": ["No such file or directory"],
        "gr\\udcfc\\udcdfe": "a name that is no UTF-8 is escaped",
        "inside": "Grüße\r\n",
        "outside": ["a link that leads out of the folder"],
        "sub/latin.md": ["not UTF-8: invalid start byte at byte 2"],
        "sub/no ending": "b",
        "zero.bin": ["not text: it has a zero byte"],
    }


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
}


def test_jsonl_takes_one_field_and_minds_no_others(here):
    """Blank lines are none; a bad one is no reason to leave out others."""
    (here / "a.jsonl").write_bytes("\r\n \r\n".join(LINES).encode())
    found = read_all(here, "jsonl:a.jsonl#body")
    assert list(found) == [f"a.jsonl:{number}" for number in range(1, 2 * len(LINES), 2)]
    for text, expected in zip(found.values(), LINES.values(), strict=True):
        if isinstance(expected, str):
            assert text == expected
        else:
            assert isinstance(text, list) and expected[0] in text[0]


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=20), escape=st.booleans())
def test_jsonl_gives_back_any_text(tmp_path_factory, texts, escape):
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    path.write_bytes("".join(json.dumps({"text": t}, ensure_ascii=escape) + "\n" for t in texts).encode())
    source = open_source(SourceSpec("jsonl", str(path)), path.parent)
    assert [source.read(number) for number in range(len(source))] == texts


def test_parquet(here):
    # As a writer that does not look at its texts leaves them: the last one is not UTF-8.
    texts = pa.StringArray.from_buffers(3, *pa.array([b"one", b"", b"\xff\xfe"]).buffers()[1:])
    pq.write_table(pa.table({"text": texts, "number": [1, 2, 3]}), here / "a.parquet")
    found = read_all(here, "parquet:a.parquet")
    assert (found["a.parquet[0]"], found["a.parquet[1]"]) == ("one", "")
    assert isinstance(found["a.parquet[2]"], list)
    numbers = read_all(here, "parquet:a.parquet#number")
    assert numbers["a.parquet[0]"] == ["the field 'number' holds int, not text"]


def test_maps_of_parquet_are_read_as_dicts(here):
    call = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    turn = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
    calls = [{"name": "f", "arguments": [("city", "Rome")]}, {"name": "g", "arguments": []}]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}]
    schema = pa.schema([("messages", pa.list_(turn))])
    pq.write_table(pa.Table.from_pylist([{"messages": messages}], schema), here / "a.parquet")
    opened = open_source(SourceSpec.parse("parquet:a.parquet", "messages"), here.parent / "cache", chat=True)
    _, answer = opened.read(0)["messages"]
    assert [call["arguments"] for call in answer["tool_calls"]] == [{"city": "Rome"}, {}]


def test_parquet_files_share_only_the_field(here):
    """As other tools write folders: an empty part, other columns and types; names may look like patterns."""
    folder = here / "g[1]"
    folder.mkdir()
    parts = [{"text": ["one"], "n": [1]}, {}, {"n": ["x"], "text": pa.array(["two"], pa.large_string())}]
    for number, part in enumerate([*parts, {"text": pa.array([], pa.string())}]):
        pq.write_table(pa.table(part), folder / f"{number}.parquet")
    assert read_all(here, "parquet:g[1]") == {"0.parquet[0]": "one", "2.parquet[0]": "two"}
    pq.write_table(pa.table({"body": ["x"]}), folder / "4.parquet")
    with pytest.raises(CorpusError, match=r"4\.parquet has no field 'text'; it has body"):
        read_all(here, "parquet:g[1]")


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
        ("text:nowhere", "needs a folder, but .*nowhere is not one"),
        ("text:empty", "has no files"),
        ("text:a.jsonl", "needs a folder"),
        ("jsonl:nowhere.jsonl", "needs a file, or a folder with files "),
        ("parquet:empty", "needs a file, or a folder with files "),
        ("parquet:a.parquet", "a.parquet has no field 'text'; it has body, number"),
        ("parquet:a.jsonl", "Cannot read parquet:a.jsonl: .*[Pp]arquet"),
        ("hf:./empty", "Cannot read hf:./empty: "),
        ("jsonl:a.jsonl.gz", "a.jsonl.gz cannot be unpacked"),
        ("jsonl:a.jsonl.xz", "a.jsonl.xz, which is compressed"),
        ("parquet:a.parquet.gz", "a.parquet.gz, which is compressed"),
    ],
)
def test_sources_that_cannot_be_used(here, source, message):
    (here / "empty").mkdir()
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.parquet.gz"):
        (here / name).write_text('{"body": "one", "number": 1}\n')
    pq.write_table(pa.table({"body": ["one"], "number": [1]}), here / "a.parquet")
    with pytest.raises(CorpusError, match=message) as caught:
        read_all(here, source)
    assert "\n" not in str(caught.value)


def test_settings_that_contradict():
    for options, message in (
        ({"tokenizer": "t", "vocab_size": 300}, "leave out --vocab-size"),
        ({"max_length": 9}, "are for --chat only"),
        ({"chat": True, "tokenizer": "t"}, "Conversations are records of jsonl:, parquet: or hf:"),
        ({"chat": True, "source": "jsonl:a"}, "template of the model's tokenizer: --tokenizer DIR"),
    ):
        with pytest.raises(CorpusError, match=message):
            PrepareSettings(**options)


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".zst"])
def test_packed_json_lines_below_a_folder_are_read(here, ending):
    (here / "deep").mkdir()
    (here / "a.jsonl").write_text('{"text": "a"}\n')
    with pa.CompressedOutputStream(str(here / "deep" / f"b.jsonl{ending}"), PACKED[ending]) as file:
        file.write(b'{"text": "b"}\n\n{"text": "c"}\n')
    packed = {f"b.jsonl{ending}:1": "b", f"b.jsonl{ending}:3": "c"}
    assert read_all(here, "jsonl:.") == {"a.jsonl:1": "a", **packed}
    assert read_all(here, f"jsonl:deep/b.jsonl{ending}") == packed


ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{}\n\n### Response:\na"
)
"""The column `text` of tatsu-lab/alpaca."""
LONG = "  q\n" * 400
USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
UNLEARNED = [{**message, "weight": 0} for message in (USER, ASSISTANT, USER)]
ASKED = {"instruction": "q", "input": "x", "output": "a"}
ENDED = {"input": "", "output": "a\n\n", "text": ALPACA.format("q")}
IN_LONG = {"instruction": LONG, "text": ALPACA.format(f"{LONG}\n\n### Input:\nx ")}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"conversations": TURNS}, [USER, ASSISTANT]),
        ({"conversations": [TURNS[0], {**TURNS[1], "weight": 0}]}, [USER, {**ASSISTANT, "weight": 0}]),
        ({"prompt": "q", "completion": "a"}, [USER, ASSISTANT]),
        ({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]}, [*UNLEARNED, ASSISTANT]),
        (ASKED | {"input": ""}, [USER, ASSISTANT]),
        (ASKED, [{**USER, "content": "q\n\nx"}, ASSISTANT]),
        (ASKED | ENDED, [USER, {**ASSISTANT, "content": "a\n\n"}]),
        (ASKED | IN_LONG, [{**USER, "content": f"{LONG}\n\nx"}, ASSISTANT]),
    ],
)
def test_records_of_other_shapes_are_conversations(here, record, messages):
    (here / "a.jsonl").write_text(json.dumps(record) + "\n")
    pq.write_table(pa.Table.from_pylist([record]), here / "a.parquet")
    for source in ("jsonl:a.jsonl", "parquet:a.parquet"):
        opened = open_source(SourceSpec.parse(source, "messages"), here.parent / "cache", chat=True)
        assert opened.read(0) == {"messages": messages, "tools": None}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"conversations": [{"from": "me", "value": "q"}]}, "'from' is 'me', which is none of human"),
        ({"conversations": ["q"]}, "a turn of 'conversations' has 'from' and 'value', not 'q'"),
        ({"question": "q", "answer": "a"}, "no field 'messages'; it has question, answer"),
        ({"instruction": "q", "output": "a", "text": "a\nq"}, "a key 'text', which is not read"),
        ({"instruction": "q", "output": "a", "text": f"q\na\n{'b' * 400}"}, "a key 'text'"),
        ({"prompt": "q", "completion": "a", "context": "q and a"}, "a key 'context'"),
    ],
)
def test_records_of_unknown_shapes_say_what_was_found(here, record, message):
    (here / "a.jsonl").write_text(json.dumps(record) + "\n")
    opened = open_source(SourceSpec.parse("jsonl:a.jsonl", "messages"), here.parent / "cache", chat=True)
    with pytest.raises(ValueError, match=message):
        opened.read(0)
