"""Preparing in parts with datatrove: the same corpus from any workers, work that goes on, what is refused."""

import json
import os
import stat
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb_titan.commands.main import main
from wlb_titan.corpus import Corpus, CorpusError, sources
from wlb_titan.corpus.folder import partial_folder
from wlb_titan.corpus.parallel import Workers, WritePart, prepare_in_parts
from wlb_titan.corpus.prepare import prepare_corpus
from wlb_titan.corpus.settings import PrepareSettings
from wlb_titan.corpus.sources import JsonLines

TEXTS = [f"Document {number} says {'la ' * (number % 50)}." for number in range(600)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """600 documents in 3 files of JSON lines, with a blank line and a broken one."""
    for file in range(3):
        lines = [json.dumps({"text": text}) for text in TEXTS[file::3]]
        (tmp_path / f"{file}.jsonl").write_text("\n".join([*lines, "", "{broken"]) + "\n")
    return tmp_path


@pytest.fixture
def tokenizer(folder) -> str:
    corpus = prepare_corpus(PrepareSettings(source=f"jsonl:{folder}", vocab_size=300), folder / "single")
    return str(corpus.tokenizer_path)


def asked(folder: Path, tokenizer: str) -> PrepareSettings:
    return PrepareSettings(source=f"jsonl:{folder}", tokenizer=tokenizer)


def content(corpus: Corpus) -> list[list[int]]:
    return [corpus.tokens(row).tolist() for row in range(len(corpus))]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_any_number_of_workers_makes_the_same_corpus(folder, tokenizer):
    first = prepare_in_parts(asked(folder, tokenizer), folder / "one", Workers(workers=1))
    second = prepare_in_parts(asked(folder, tokenizer), folder / "two", Workers(workers=2))
    assert files(first.path) == files(second.path)
    assert set(os.listdir(first.path)) == {
        *(f"documents-{part:05d}.{ending}" for part in range(3) for ending in ("arrow", "batches", "sums")),
        *("manifest.json", "tokenizer", "unreadable.txt"),
    }
    single = Corpus.open(folder / "single")
    assert sorted(content(first)) == sorted(content(single))
    assert first.manifest.unreadable == single.manifest.unreadable == 3
    assert first.source(0).split("@")[0] == "0.jsonl"
    assert not list(folder.glob(".*")), "nothing is left beside the corpora"
    # It is there, so asking again does nothing, and other settings are refused as ever.
    assert (
        prepare_in_parts(asked(folder, tokenizer), folder / "one", Workers()).fingerprint == first.fingerprint
    )
    with pytest.raises(CorpusError, match="made with other settings"):
        prepare_in_parts(PrepareSettings(source=f"jsonl:{folder}"), folder / "one", Workers())


def test_interrupted_work_goes_on(folder, tokenizer, monkeypatch):
    """The second of three tasks fails; the next time only it and the third are done."""
    done = []
    write = WritePart.__call__

    def failing(self, data, rank=0, world_size=1):
        done.append(rank)
        if done == [0, 1]:
            raise OSError("no space left")
        write(self, data, rank, world_size)

    monkeypatch.setattr(WritePart, "__call__", failing)
    output = folder / "corpus"
    with pytest.raises(CorpusError, match=r"no space left\. What is done is kept"):
        prepare_in_parts(asked(folder, tokenizer), output, Workers(workers=1))
    assert not output.exists()
    with pytest.raises(CorpusError, match="was interrupted, or is still running"):
        Corpus.open(output)
    corpus = prepare_in_parts(asked(folder, tokenizer), output, Workers(workers=1))
    assert done == [0, 1, 1, 2]
    whole = prepare_in_parts(asked(folder, tokenizer), folder / "whole", Workers(workers=1))
    assert files(corpus.path) == files(whole.path)


def test_unfinished_work_of_other_settings_is_thrown_away(folder, tokenizer):
    output = folder / "corpus"
    partial = partial_folder(output)
    partial.mkdir()
    (partial / ".lock").touch()
    (partial / "settings.json").write_text("{}")
    (partial / "documents-00000.arrow").write_bytes(b"of something else")
    corpus = prepare_in_parts(asked(folder, tokenizer), output, Workers(workers=1))
    assert len(corpus) == 600


def test_a_tokenizer_is_trained_on_some_of_the_parts(folder):
    corpus = prepare_in_parts(
        PrepareSettings(source=f"jsonl:{folder}", vocab_size=280), folder / "c", Workers(workers=1)
    )
    assert corpus.tokenizer.vocab_size == 280
    assert len(corpus) == 600


def test_slurm_runs_the_tasks_as_a_job_array(folder, tokenizer, monkeypatch):
    """Programs stand in for sbatch and srun: they run each task of the array in a process of its own."""
    commands = folder / "bin"
    commands.mkdir()
    sbatch = (
        "import os, re, subprocess, sys\n"
        "script = open(sys.argv[-1]).read()\n"
        "if 'merge_stats' in script:\n"
        "    sys.exit(print('Submitted batch job 18'))\n"
        "found = re.search(r'--array=0-(\\d+)', script)\n"
        "for task in range(int(found[1]) + 1 if found else 1):\n"
        "    environment = {**os.environ, 'SLURM_ARRAY_TASK_ID': str(task), 'SLURM_NODELIST': 'here',\n"
        "        'SLURM_CPUS_PER_TASK': '1', 'SLURM_MEM_PER_CPU': '1', 'SLURM_GPUS_ON_NODE': '0'}\n"
        "    subprocess.run(['bash', sys.argv[-1]], env=environment, stdout=2)\n"
        "print('Submitted batch job 17')\n"
    )
    srun = "import os, sys\nos.execvp(sys.argv[4], sys.argv[4:])\n"
    for name, text in (("sbatch", sbatch), ("srun", srun), ("scontrol", "print('here')\n")):
        (commands / name).write_text(f"#!{sys.executable}\n{text}")
        (commands / name).chmod(0o755 | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    workers = Workers(executor="slurm", options={"partition": "cpu", "time": "1:00:00", "cpus_per_task": "2"})
    asked = PrepareSettings(source=f"jsonl:{folder / '0.jsonl'}", tokenizer=tokenizer)
    assert prepare_in_parts(asked, folder / "corpus", workers) is None
    assert (folder / ".corpus.logs").is_dir(), "a cluster's logs are kept"
    whole = prepare_in_parts(asked, folder / "whole", Workers(workers=1))
    assert files(folder / "corpus") == files(whole.path)


def test_the_command(folder, tokenizer):
    arguments = ["prepare", folder / "corpus", "--source", f"jsonl:{folder}", "--tokenizer", tokenizer]
    arguments += ["--executor", "local", "--workers", 2]
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert "documents  600" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "5"], "max_tokens is met by counting in order"),
        (["--executor-option", "partition"], "write it as NAME=VALUE"),
        (["--executor-option", "partition=cpu"], "LocalPipelineExecutor has no option 'partition'; it has"),
        (["--executor-option", "local-tasks=many"], "local_tasks of LocalPipelineExecutor must be a number"),
        (
            ["--executor", "slurm", "--executor-option", "time=1:00"],
            "also needs partition: --executor-option",
        ),
        (["--executor", "ray", "--source", "nothing"], "'nothing' is not a source"),
    ],
)
def test_mistakes_are_told(folder, tokenizer, options, message):
    arguments = ["prepare", folder / "c", "--source", f"jsonl:{folder}", "--executor", "local", *options]
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (folder / "c").exists()


@settings(max_examples=60)
@given(lines=st.lists(st.text(alphabet="ab ", max_size=6), max_size=12), cuts=st.lists(st.integers(0, 90)))
def test_spans_of_a_file_have_each_line_once(tmp_path_factory, lines, cuts):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes("".join(f"{json.dumps({'text': line})}\n" for line in lines).encode())
    bounds = sorted({0, path.stat().st_size, *(cut for cut in cuts if cut < path.stat().st_size)})
    spans = [JsonLines(path, "text", span) for span in pairwise(bounds)]
    found = [text for span in spans for document in range(len(span)) for text in span.read(document)]
    assert found == lines


def test_parts_follow_from_the_source(folder, monkeypatch):
    monkeypatch.setattr(sources, "BYTES_A_PART", 1000)
    monkeypatch.setattr(sources, "MOST_PARTS", 4)
    source = sources.open_source(PrepareSettings(source=f"jsonl:{folder}"), folder / "cache")
    assert len(source) == 603
    parts = source.parts()
    assert len(parts) == 4
    assert sum(len(part) for part in parts) == 603
    read = [next(part.read(document)) for part in parts for document in range(len(part))]
    assert [str(text) for text in read if text in TEXTS] == [t for f in range(3) for t in TEXTS[f::3]]


@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_other_sources_in_parts(tmp_path, monkeypatch, kind):
    import datasets

    monkeypatch.setattr(sources, "FILES_A_PART", 7)
    monkeypatch.setattr(sources, "ROWS_A_PART", 7)
    (tmp_path / "in").mkdir()
    if kind == "text":
        for number, text in enumerate(TEXTS[:20]):
            (tmp_path / "in" / f"{number}.txt").write_text(text)
    else:
        for number in range(2):
            part = datasets.Dataset.from_dict({"text": TEXTS[number * 10 : number * 10 + 10]})
            part.to_parquet(str(tmp_path / "in" / f"{number}.parquet"))
    asked = PrepareSettings(source=f"{kind}:{tmp_path / 'in'}", vocab_size=270)
    corpus = prepare_in_parts(asked, tmp_path / "c", Workers(workers=1))
    assert len(corpus) == 20
    assert len(list((tmp_path / "c").glob("*.arrow"))) == 3
    assert not (tmp_path / "c" / "cache").exists()
