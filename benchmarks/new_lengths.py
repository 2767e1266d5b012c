"""What a length that is new costs: host time in which DTensor works out how each operation is sharded.

    python benchmarks/new_lengths.py --context-parallel 2 --data-parallel 4

runs micro-batches of several lengths, each length twice, through the debug model as rank 0 of a job whose
other ranks do not exist (torchtitan's fake backend: communication does nothing). Times are processor time of
forward and backward. What the first micro-batch of a length takes beyond the second is paid once for each
length in each process, whatever the number of layers; `wlb.packing.length_multiple` makes lengths few.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import click
import numpy as np
import torch

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

from wlb_titan.corpus.prepare import prepare_corpus  # noqa: E402
from wlb_titan.corpus.settings import PrepareSettings  # noqa: E402
from wlb_titan.planner import sharding  # noqa: E402
from wlb_titan.planner.plan import MicroBatch  # noqa: E402
from wlb_titan.runtime.registry import base_config  # noqa: E402
from wlb_titan.runtime.trainer import Trainer  # noqa: E402


def build(folder: Path, degrees: dict[str, int], ranks: int) -> Trainer:
    (folder / "texts.jsonl").write_text('{"text": "one document is enough"}\n' * 8)
    prepare_corpus(
        PrepareSettings(source=f"jsonl:{folder / 'texts.jsonl'}#text", vocab_size=300), folder / "corpus"
    )
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "NGPU": str(ranks)}
    config = base_config("llama3_debug")
    config.comm.mode = "fake_backend"
    config.dump_folder = str(folder / "run")
    config.debug.enable_structured_logging = False
    config.wlb.corpus.path = str(folder / "corpus")
    config.training.local_batch_size = 1
    for name, degree in degrees.items():
        setattr(config.parallelism, f"{name}_degree", degree)
    return Trainer(config)


def cpu_seconds(trainer: Trainer, length: int) -> float:
    """Of forward and backward of a micro-batch that is one document."""
    lengths = np.array([length])
    cp = trainer.parallel_dims.cp
    ranks = sharding.per_sequence(lengths, length, cp) if cp > 1 else None
    documents = np.array([[0, 0, length, 0]])
    tokens = torch.ones(1, length, dtype=torch.int64)
    item = {
        "input": tokens,
        "positions": torch.arange(length).unsqueeze(0),
        "micro_batch": MicroBatch(0, 0, length, 0, 1.0, documents, "per_sequence", ranks),
    }
    begin = time.process_time()
    trainer.forward_backward_step(
        input_dict=item, labels=tokens.clone(), global_valid_tokens=torch.tensor(length)
    )
    return time.process_time() - begin


@click.command()
@click.option("--data-parallel", default=1, show_default=True, help="Degree.")
@click.option("--context-parallel", default=1, show_default=True, help="Degree.")
@click.option("--tensor-parallel", default=1, show_default=True, help="Degree.")
@click.option("--lengths", default=4, show_default=True, help="How many different ones.")
def main(data_parallel: int, context_parallel: int, tensor_parallel: int, lengths: int) -> None:
    torch.set_num_threads(1)
    degrees = {
        "context_parallel": context_parallel,
        "tensor_parallel": tensor_parallel,
        "data_parallel_shard": data_parallel,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(Path(folder), degrees, data_parallel * context_parallel * tensor_parallel)
        cpu_seconds(trainer, 128)  # the first of all pays for more
        for length in range(192, 192 + 64 * lengths, 64):
            new, again = cpu_seconds(trainer, length), cpu_seconds(trainer, length)
            print(f"{length:5} tokens: {new:6.2f} s, again {again:6.2f} s", flush=True)
        trainer.close()


if __name__ == "__main__":
    main()
