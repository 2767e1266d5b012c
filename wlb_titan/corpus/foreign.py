"""Corpora that other tools wrote, opened where they lie: Megatron's, datatrove's, Hugging Face's.

| what lies at the path | it is |
| --- | --- |
| a folder with NAME.ds files, or one such file | datatrove's tokenized files |
| a folder with NAME.bin and NAME.idx files, or one such pair (with either ending, or without) | Megatron's |
| a folder with state.json and dataset_info.json | a dataset of Hugging Face's, by `save_to_disk` |

The files of a folder are read in the order of their names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from wlb_titan.corpus.arrow import ArrowShard
from wlb_titan.corpus.datatrove import DatatroveShard
from wlb_titan.corpus.megatron import MegatronShard
from wlb_titan.corpus.shards import Shard
from wlb_titan.errors import CorpusError

SAMPLES = 16  # places of a file that its fingerprint reads
SAMPLE_BYTES = 4096


def open_foreign(path: Path, column: str) -> Sequence[Shard] | None:
    """The shards of the corpus at `path`; None where nothing there is known.

    Args:
        path: absolute.
        column: of Hugging Face's datasets, the one with the token ids.

    Raises:
        CorpusError: the files are damaged, or do not hold documents of token ids.
    """
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        named = ", ".join(str(path / split) for split in splits)
        raise CorpusError(
            f"{path} holds a dataset of several splits; name the folder of one of them: {named}."
        )
    if (path / "state.json").is_file():
        return [ArrowShard(file, column) for file in _data_files(path)]
    if path.suffix == ".ds" and path.is_file():
        return [DatatroveShard(path)]
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if Path(f"{prefix}.idx").is_file():
        return [MegatronShard(prefix)]
    if not path.is_dir():
        return None
    if tokenized := sorted(path.glob("*.ds")):
        return [DatatroveShard(file) for file in tokenized]
    if indexed := sorted(path.glob("*.idx")):
        return [MegatronShard(file.with_suffix("")) for file in indexed]
    return None


def _data_files(folder: Path) -> list[Path]:
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(
            f"{folder / 'state.json'} is damaged ({error!r}); save the dataset again."
        ) from error


def fingerprint_of_files(files: Iterable[Path]) -> str:
    """16 hexadecimal digits of names, sizes, and pages spread over each file, as hashing all takes hours.

    They do not change when the files are copied elsewhere.
    """
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for place in range(SAMPLES):
                stream.seek(max(size - SAMPLE_BYTES, 0) * place // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def files_of(shard: Shard) -> list[Path]:
    """The files that a shard reads: its tokens, and the index beside them."""
    path = shard.path
    beside = (path.with_name(path.name + ".index"), path.with_suffix(".idx"))
    return [path, *(file for file in beside if file.is_file())]
