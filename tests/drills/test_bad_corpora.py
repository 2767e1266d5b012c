"""Corpora, tokenizers, manifests and texts that are damaged or odd: a CorpusError, or what can be used is."""

from __future__ import annotations

import json
import random
import shutil

import pyarrow as pa
import pyarrow.parquet
import pytest

from wlb_titan.corpus import Corpus, CorpusError
from wlb_titan.corpus.corpus import verify
from wlb_titan.corpus.manifest import _hash
from wlb_titan.corpus.prepare import prepare_corpus
from wlb_titan.corpus.settings import PrepareSettings

AREA = "odd data, tokenizers, manifests"
FLIPS = 300


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small corpus and all of its tokens."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "texts").mkdir()
    for number in range(40):
        (folder / "texts" / f"{number}.txt").write_text(f"word {number} " * (1 + number * 7 % 60))
    corpus = prepare_corpus(
        PrepareSettings(source=f"text:{folder / 'texts'}", vocab_size=300), folder / "corpus"
    )
    return corpus


def content(corpus: Corpus) -> list[list[int]]:
    return [corpus.tokens(row).tolist() for row in range(len(corpus))]


def outcome(folder, expected) -> str:
    """Empty where a corpus is refused as it should be, or is read as it was written."""
    try:
        found = content(Corpus.open(folder))
    except CorpusError as error:
        return "" if str(folder) in str(error) else f"does not name the folder: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if found == expected else "other tokens"


def judge(record_property, tried: int, poorly: list[str]) -> None:
    record_property("tried", tried)
    record_property("poorly", len(poorly))
    assert not poorly, f"{len(poorly)} of {tried}:\n" + "\n".join(poorly)


def test_flipped_bits(whole, tmp_path, record_property):
    """Of any file, one after the other, each of which `verify` must find."""
    draw, poorly = random.Random(0), []
    shutil.copytree(whole.path, tmp_path / "c")
    files = [path for path in (tmp_path / "c").rglob("*") if path.is_file()]
    for _ in range(FLIPS):
        file = draw.choice(files)
        good = file.read_bytes()
        bad = bytearray(good)
        place = draw.randrange(8 * len(bad))
        bad[place // 8] ^= 1 << place % 8
        file.write_bytes(bad)
        try:
            verify(tmp_path / "c", lambda *report: None)
            poorly.append(f"{file.name}, bit {place}: not found")
        except CorpusError as error:
            if str(tmp_path / "c") not in str(error):
                poorly.append(f"{file.name}, bit {place}: does not name the folder: {error}")
        file.write_bytes(good)
    judge(record_property, FLIPS, poorly)


def test_files_cut_off_grown_and_gone(whole, tmp_path, record_property):
    expected, poorly, tried = content(whole), [], 0
    for name in [*whole.manifest.files, "manifest.json"]:
        for what in ("gone", "empty", "half", "longer", "a folder"):
            shutil.copytree(whole.path, tmp_path / "c")
            file = tmp_path / "c" / name
            good = file.read_bytes()
            file.unlink()
            if what == "a folder":
                file.mkdir()
            elif what != "gone":
                file.write_bytes({"empty": b"", "half": good[: len(good) // 2], "longer": good + b"\0"}[what])
            tried += 1
            if wrong := outcome(tmp_path / "c", expected):
                poorly.append(f"{name} {what}: {wrong}")
            shutil.rmtree(tmp_path / "c")
    judge(record_property, tried, poorly)


def test_manifests_of_other_content(whole, tmp_path, record_property):
    """Each key of another type, absurd or missing, under a hash that is right."""
    expected, poorly, tried = content(whole), [], 0
    shutil.copytree(whole.path, tmp_path / "c")
    file = tmp_path / "c" / "manifest.json"
    good = json.loads(file.read_text())
    del good["manifest_sha256"]
    for key in good:
        for value in (None, "big", -1, 10**30, [], {}, {"../x": 1}, 1.5, True, "missing"):
            changed = {name: v for name, v in good.items() if name != key}
            if value != "missing":
                changed[key] = value
            if changed == good:
                continue
            file.write_text(json.dumps(changed | {"manifest_sha256": _hash(changed)}))
            tried += 1
            if wrong := outcome(tmp_path / "c", expected):
                poorly.append(f"{key} = {value}: {wrong}")
    judge(record_property, tried, poorly)


GOOD = '{"text": "a good line"}\n'
TEXTS = {
    "blank": "\n\n",
    "not JSON": "{broken\n",
    "deep": '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
    "list": "[1, 2]\n",
    "number": '{"text": 5}\n',
    "null": '{"text": null}\n',
    "other field": '{"body": "x"}\n',
    "surrogate": '{"text": "\\ud800"}\n',
    "digits": '{"text": ' + "9" * 5000 + "}\n",
    "NaN": '{"text": NaN}\n',
    "unbroken": json.dumps({"text": "ACGT" * 50_000}) + "\n",
    "spaces": json.dumps({"text": " " * 200_000}) + "\n",
    "zero": json.dumps({"text": "a\0b"}) + "\n",
    "emoji": json.dumps({"text": "\U0001f469‍\U0001f680" * 1000}, ensure_ascii=False) + "\n",
}


def test_odd_records(tmp_path, record_property):
    """Beside a good one, which is kept in any case."""
    poorly, tried = [], 0
    for name, text in TEXTS.items():
        for number, lines in enumerate((GOOD + text, text + GOOD)):
            tried += 1
            file = tmp_path / f"{number} {name}.jsonl"
            file.write_text(lines, encoding="utf-8")
            try:
                settings = PrepareSettings(source=f"jsonl:{file}", vocab_size=300)
                corpus = prepare_corpus(settings, tmp_path / f"{number} {name}")
                assert len(corpus) >= 1
            except Exception as error:
                poorly.append(f"{name}: {type(error).__name__}: {error}")
    tables = {
        "invalid UTF-8": pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary()).view(pa.binary()),
        "nulls": pa.array(["good", None, "fine"]),
    }
    for name, column in tables.items():
        tried += 1
        if column.type == pa.binary():  # as a writer that does not look at its texts leaves them
            column = pa.StringArray.from_buffers(3, *column.buffers()[1:])
        file = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pa.table({"text": column}), file)
        try:
            corpus = prepare_corpus(
                PrepareSettings(source=f"parquet:{file}#text", vocab_size=300), tmp_path / f"p {name}"
            )
            assert len(corpus) == 2
        except Exception as error:
            poorly.append(f"{name}: {type(error).__name__}: {error}")
    judge(record_property, tried, poorly)


def test_odd_tokenizers(whole, tmp_path, record_property):
    texts = tmp_path / "a.jsonl"
    texts.write_text(GOOD)
    good = json.loads((whole.tokenizer_path / "tokenizer.json").read_text())
    configuration = json.loads((whole.tokenizer_path / "tokenizer_config.json").read_text())
    cases = {
        "empty": ("", configuration),
        "not JSON": ("{", configuration),
        "a list": ("[]", configuration),
        "no model": (json.dumps({**good, "model": None}), configuration),
        "no vocabulary": (json.dumps({**good, "model": {**good["model"], "vocab": {}}}), configuration),
        "unknown end of text": (json.dumps(good), {**configuration, "eos_token": "<nope>"}),
        "end of text is a number": (json.dumps(good), {**configuration, "eos_token": 5}),
        "configuration is a list": (json.dumps(good), []),
        "no configuration": (json.dumps(good), None),
    }
    poorly = []
    for name, (tokenizer, config) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tokenizer.json").write_text(tokenizer)
        if config is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        try:
            prepare_corpus(
                PrepareSettings(source=f"jsonl:{texts}", tokenizer=str(folder)), tmp_path / f"c {name}"
            )
        except CorpusError:
            continue
        except BaseException as error:
            poorly.append(f"{name}: {type(error).__name__}: {error}")
        else:
            poorly.append(f"{name}: accepted")
    judge(record_property, len(cases), poorly)


TURNS = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
CHATS = {
    "text": "hello",
    "empty": [],
    "null": None,
    "number": 5,
    "list of texts": ["One?", "Two."],
    "no role": [{"content": "One?"}, TURNS[1]],
    "role of a number": [{"role": 1, "content": "One?"}, TURNS[1]],
    "another schema": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Two."}],
    "no content": [{"role": "user"}, TURNS[1]],
    "null content": [{"role": "user", "content": None}, TURNS[1]],
    "content of a number": [{"role": "user", "content": 5}, TURNS[1]],
    "white space": [TURNS[0], {"role": "assistant", "content": " \n"}],
    "no assistant": TURNS[:1],
    "special token": [{"role": "user", "content": "<|endoftext|>"}, TURNS[1]],
    "half a surrogate": [{"role": "user", "content": "\ud800"}, TURNS[1]],
}
TEMPLATES = {
    "drops the first turn": TEMPLATE.replace("in messages", "in messages[1:]"),
    "rewrites earlier turns": TEMPLATE.replace("{{ m['role'] }}", "{{ m['role'] }} {{ messages | length }}"),
    "raises": "{{ raise_exception('no') }}",
    "syntax": "{% for m in messages %}",
    "unknown function": "{{ f(messages) }}",
    "nothing": "{{ '' }}",
}


def test_bad_conversations(whole, tmp_path, record_property):
    """Each ends the preparation in a paragraph with its line, and nothing is written."""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(whole.tokenizer_path, tokenizer)
    cases = {name: (messages, TEMPLATE) for name, messages in CHATS.items()}
    cases |= {name: (TURNS, template) for name, template in TEMPLATES.items()}
    cases |= {"good": (TURNS, TEMPLATE)}
    poorly = []
    for name, (messages, template) in cases.items():
        (tokenizer / "chat_template.jinja").write_text(template)
        file = tmp_path / "chat.jsonl"
        lines = [TURNS, messages] if template == TEMPLATE else [messages]
        file.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
        settings = PrepareSettings(source=f"jsonl:{file}", tokenizer=str(tokenizer), chat=True)
        said = ""
        try:
            prepare_corpus(settings, tmp_path / name)
        except CorpusError as error:
            said = str(error)
        except Exception as error:
            poorly.append(f"{name}: {type(error).__name__}: {error}")
        if (name == "good") != (not said) or (said and f"chat.jsonl:{len(lines)}: " not in said):
            poorly.append(f"{name}: {said or 'was prepared'}")
        if said and (tmp_path / name).exists():
            poorly.append(f"{name}: something was written")
    judge(record_property, len(cases), poorly)
