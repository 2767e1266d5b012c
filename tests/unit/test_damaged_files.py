"""Damaged bytes and nonsense values: whoever reads a file of others takes it, or names it in one error."""

import functools
import json
import os
import re
import shutil
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet
import pytest
from commands import ROOT
from dumps import record, write_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wlb_titan.commands.compare import bench_of, figure_rows, remarks, run_steps
from wlb_titan.corpus import Corpus
from wlb_titan.cost.cluster import CLUSTERS, load_cluster
from wlb_titan.cost.profile import Profile
from wlb_titan.documents.lengths import named_or_read
from wlb_titan.errors import UserError
from wlb_titan.files import save
from wlb_titan.prepare.chat import ChatTemplate
from wlb_titan.prepare.sources import SourceSpec, open_source
from wlb_titan.prepare.tokenizer import CorpusTokenizer, train_tokenizer
from wlb_titan.runs import open_runs
from wlb_titan.toml.sources import read_sources

pytestmark = pytest.mark.slow

SAID = [{"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": "5"}]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def use_corpus(path):
    corpus = Corpus.open(path)
    corpus.check_sample(1000)
    return [(corpus.tokens(row), corpus.source(row)) for row in range(len(corpus))]


def use_records(kind, path):
    source = open_source(SourceSpec.parse(f"{kind}:{path}"), path.parent / "cache")
    texts = []
    for number in range(len(source)):
        try:
            texts.append(source.read(number))
        except ValueError as error:  # told in unreadable.txt
            texts.append(f"{source.name(number)}: {error}")
    return texts


def use_run(path):
    runs = open_runs([path.parent])
    return figure_rows(runs), remarks(runs), run_steps(runs)


def use_template(path):
    messages = SimpleNamespace(read=lambda _: {"messages": SAID, "tools": None}, name=lambda _: str(path))
    return ChatTemplate(CorpusTokenizer(path.parent)).document(messages, 0)


READERS = {  # what is damaged -> who reads it
    "a.toml": read_sources,
    "cluster.toml": lambda path: load_cluster(str(path)),
    "profile.json": Profile.load,
    "lengths.txt": lambda path: named_or_read(str(path)),
    "run/metrics.jsonl": use_run,
    "run/config.toml": use_run,
    "run/traces/step-2.json": lambda path: use_run(path.parent),
    "bench/bench.json": lambda path: bench_of(path.parent),
    "a.jsonl": functools.partial(use_records, "jsonl"),
    "a.parquet": functools.partial(use_records, "parquet"),
    "m.idx": use_corpus,
    "m.bin": use_corpus,
    "t.ds": use_corpus,
    "t.ds.index": lambda path: use_corpus(path.with_suffix("")),
    "p/corpus.json": lambda path: use_corpus(path.parent),
    "p/state.json": lambda path: use_corpus(path.parent),
    "p/data-00000-of-00001.arrow": lambda path: use_corpus(path.parent),
    "tokenizer/tokenizer.json": lambda path: CorpusTokenizer(path.parent).encode(["hello"]),
    "tokenizer/tokenizer_config.json": lambda path: CorpusTokenizer(path.parent),
    "tokenizer/chat_template.jinja": use_template,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, forms):
    """A folder with a good file of each kind."""
    folder = shutil.copytree(forms, tmp_path_factory.mktemp("whole") / "files")
    (folder / "a.toml").write_text('base = "llama3_debug"\n[training]\nsteps = 5\nseq_len = [1, {a = "b"}]\n')
    shutil.copy(CLUSTERS / "h200.toml", folder / "cluster.toml")
    shutil.copy(ROOT / "benchmarks/results/cpu/attention_profile.json", folder / "profile.json")
    (folder / "lengths.txt").write_text("5\n700\n31\n")
    figures = {
        "bubble": 0.1,
        "memory_gib": 1.5,
        "model_tflops": 2.0,
        "part_seconds": {"forward": 1.0, "waiting": 0.5},
    }
    records = [record(step, **figures) for step in (1, 2, 3)]
    write_run(folder / "run", records, traced=[2])
    (folder / "bench" / "turns").mkdir(parents=True)
    shutil.copy(folder / "run/traces/step-2.json", folder / "bench/turns")
    turn = {"policy": "plain", "predicted": None, "scatter": 0.1, "over_first": 1.0, "flops_per_second": 1e12}
    turn |= {"step": 2, "parts": {"forward": 1.0, "waiting": 0.5}}
    turn |= dict.fromkeys(("tokens_per_second", "imbalance", "bubble", "peak_gib"), 1.5)
    (folder / "bench" / "bench.json").write_text(json.dumps({"policies": [turn, turn]}))
    texts = ["to be", "or not", "to be"] * 9
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pa.parquet.write_table(pa.table({"text": texts}), folder / "a.parquet")
    train_tokenizer(texts, 300, folder / "tokenizer")
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    return folder


NONSENSE = (
    'null -1 0 1e400 NaN 1e-320 99999999999999999999 true [] {} [[]] "" "a\\u0000b" \'\' \\ud800 {{ % # \0'
)


def test_the_whole_files_are_read(whole):
    assert all(READERS[name](whole / name) for name in READERS)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damage_is_taken_or_named(whole, tmp_path_factory, name, data):
    """Bytes are flipped, cut off or put in; a value of a text is another."""
    folder = shutil.copytree(whole, tmp_path_factory.mktemp("damaged") / "files")
    content = bytearray((folder / name).read_bytes())
    values = list(re.finditer(rb"[\w.+-]+|\"[^\"]*\"|[\[{][^\[{]*?[\]}]", content))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1)) if content else 0
        match data.draw(st.sampled_from(["value", "value", "flip", "cut", "put"])):
            case "value" if values:
                begin, end = data.draw(st.sampled_from(values)).span()
                content[begin:end] = data.draw(st.sampled_from(NONSENSE.split(" "))).encode()
            case "flip" if content:
                content[place] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del content[place:]
            case "put":
                deep = st.sampled_from([b"[" * 20_000, b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\0" * 8])
                content[place:place] = data.draw(st.binary(max_size=9) | deep)
    (folder / name).write_bytes(content)
    try:
        READERS[name](folder / name)
    except UserError as error:
        assert "\n" not in str(error).strip() and str(folder) in str(error), error
    finally:
        shutil.rmtree(folder.parent)


@pytest.mark.parametrize("name", [name for name in READERS if name != "p/corpus.json"])
def test_a_pipe_is_refused_and_not_waited_for(whole, tmp_path, name):
    folder = shutil.copytree(whole, tmp_path / "files")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UserError):
        READERS[name](folder / name)


def test_a_file_is_the_former_one_or_all_of_the_new(tmp_path, monkeypatch):
    save(tmp_path / "file", {"whole": [1]})
    monkeypatch.setattr(os, "fsync", lambda _: os.write(-1, b""))  # fails when all is written beside the file
    with pytest.raises(OSError, match="Bad file descriptor"):
        save(tmp_path / "file", "new")
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == '{"whole": [1]}\n'


def test_pipes_and_links_to_them_are_written_to_directly(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDWR), "rb", buffering=0) as end:
        for name in ("pipe", "link"):
            save(tmp_path / name, "text")
            assert end.read(9) == b"text"
