"""Tokens a second of preparing a corpus, beside `datasets.map`.

    python benchmarks/packing_prepare.py --folder FOLDER

The text is that of Python files of this machine, as JSON lines in eight files; the tokenizer is one of 4,096
entries, the same for all. Each way runs in a process of its own, and what is counted is processor time, its
own and its children's (which are forked to be counted), as wall time depends on other load on the machine.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
from common.packing import save

from wlb_titan.corpus import Corpus
from wlb_titan.corpus.prepare import PrepareSettings, prepare_corpus
from wlb_titan.corpus.sources import SourceSpec, open_source

FILES = 8
MAP = """
import sys
import datasets
from wlb_titan.corpus.tokenizer import CorpusTokenizer
from pathlib import Path

folder, workers = Path(sys.argv[1]), int(sys.argv[2])
tokenizer = CorpusTokenizer(folder / "tokenizer")
end = tokenizer.end_of_text_id

def tokenize(batch):
    return {"input_ids": [[*ids, end] for ids in tokenizer.encode(batch["text"])]}

files = sorted(str(path) for path in (folder / "texts").glob("*.jsonl"))
texts = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(folder / "cache"))
features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
columns = texts.column_names
tokens = texts.map(tokenize, batched=True, remove_columns=columns, num_proc=workers, features=features)
tokens.save_to_disk(str(folder / "mapped"))
"""


def write_texts(folder: Path, characters: int) -> None:
    """Eight files of JSON lines, and a tokenizer."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    source = open_source(SourceSpec("python-source"), folder / "cache")
    files = [(texts / f"{number}.jsonl").open("w") for number in range(FILES)]
    for document in range(len(source)):
        try:
            text = source.read(document)
        except ValueError:
            continue
        files[document % FILES].write(json.dumps({"text": text}) + "\n")
        characters -= len(text)
        if characters < 0:
            break
    for file in files:
        file.close()
    trained = prepare_corpus(PrepareSettings(source=f"jsonl:{texts}", max_tokens=1000), folder / "trained")
    (folder / "trained" / "tokenizer").rename(folder / "tokenizer")
    assert trained.manifest is not None


def measure(name: str, arguments: list[str], result: Path) -> dict[str, Any]:
    """Runs a command; its wall and processor seconds, and tokens a second of each."""
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment)
    wall = time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    tokens = Corpus.open(result).lengths.sum()
    row = {
        "way": name,
        "tokens": tokens,
        "seconds": wall,
        "processor_seconds": processor,
        "tokens_per_second": tokens / wall,
        "tokens_per_processor_second": tokens / processor,
    }
    print(json.dumps(row), flush=True)
    return row


@click.command()
@click.option(
    "--folder", type=click.Path(path_type=Path), required=True, help="Where to work; must not exist."
)
@click.option("--characters", default=100_000_000, show_default=True, help="Text to tokenize.")
def main(folder: Path, characters: int) -> None:
    """Measure two ways of tokenizing the same text."""
    write_texts(folder, characters)
    prepare = ["-m", "wlb_titan.commands.main", "prepare"]
    options = ["--source", f"jsonl:{folder / 'texts'}", "--tokenizer", str(folder / "tokenizer")]
    rows = [
        measure("datasets.map, 2 processes", ["-c", MAP, str(folder), "2"], folder / "mapped"),
        measure("prepare", [*prepare, str(folder / "one"), *options], folder / "one"),
    ]
    save("packing_prepare", {"characters": characters, "rows": rows})


if __name__ == "__main__":
    main()
