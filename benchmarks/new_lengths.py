"""What a micro-batch costs the host: one of a length that was never seen, and one of a length seen before.

    python benchmarks/new_lengths.py
    python benchmarks/new_lengths.py --layout cp2_tp2 --compile aot_eager --lengths 40

runs micro-batches of several lengths, each length four times, through the debug model as rank 0 of a job
whose other ranks do not exist (torchtitan's fake backend: communication does nothing). Times are processor
time of forward and backward of one thread, so they hold the small model's computation too. With `--compile`
it also counts the graphs that torch.compile has made so far.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import click
import numpy as np
import torch
from common import save, show

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

from torch._dynamo.utils import counters  # noqa: E402

from wlb_titan.plan import LENGTH, MicroBatch  # noqa: E402
from wlb_titan.prepare.prepare import PrepareSettings, prepare_corpus  # noqa: E402
from wlb_titan.runtime.dataloader import Item  # noqa: E402
from wlb_titan.runtime.models.bases import base_config  # noqa: E402
from wlb_titan.runtime.trainer import Trainer  # noqa: E402

LAYOUTS = {
    "dp2_cp2": {"data_parallel_shard": 2, "context_parallel": 2},
    "cp2_tp2": {"context_parallel": 2, "tensor_parallel": 2},
    "cp4_tp2": {"context_parallel": 4, "tensor_parallel": 2},
    "dp2_cp2_tp2": {"data_parallel_shard": 2, "context_parallel": 2, "tensor_parallel": 2},
    "hsdp2x2_cp2": {"data_parallel_replicate": 2, "data_parallel_shard": 2, "context_parallel": 2},
}
DEFAULT = ("dp2_cp2", "cp4_tp2", "dp2_cp2_tp2", "hsdp2x2_cp2")
WINDOW = 1024
AGAIN = 3  # times that a length is seen again


def build(folder: Path, degrees: dict[str, int], backend: str | None) -> Trainer:
    (folder / "texts.jsonl").write_text('{"text": "one document is enough"}\n' * 8)
    prepare_corpus(
        PrepareSettings(source=f"jsonl:{folder / 'texts.jsonl'}#text", vocab_size=300), folder / "corpus"
    )
    ranks = int(np.prod(list(degrees.values())))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "NGPU": str(ranks)}
    config = base_config("llama3_debug")
    config.comm.mode = "fake_backend"
    config.dump_folder = str(folder / "run")
    config.debug.enable_structured_logging = False
    config.wlb.corpus.path = str(folder / "corpus")
    config.training.local_batch_size = 1
    config.training.seq_len = WINDOW
    if backend is not None:
        config.compile.enable, config.compile.backend = True, backend
    for name, degree in degrees.items():
        setattr(config.parallelism, f"{name}_degree", degree)
    return Trainer(config)


def cpu_seconds(trainer: Trainer, length: int, documents: int = 2) -> float:
    """Of forward and backward of a micro-batch of equal documents."""
    lengths = np.full(documents, length // documents)
    lengths[-1] += length % documents
    documents = np.pad(lengths[:, None], ((0, 0), (LENGTH, 0)))
    micro_batch = trainer.job.sharded([MicroBatch(documents, length=length)])[0]
    tokens = np.ones(length, dtype=np.int64)
    positions = np.concatenate([np.arange(n) for n in lengths])
    rank = trainer.parallel_dims.place("cp")
    begin = time.process_time()
    item = Item.of(micro_batch, trainer.job, rank, tokens, tokens, positions)
    trainer.forward_backward([item], torch.tensor(length))
    return time.process_time() - begin


def measure(layout: str, lengths: int, backend: str | None) -> dict:
    """Seconds of each length, new and again, in this process."""
    torch.set_num_threads(1)
    result = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(Path(folder), LAYOUTS[layout], backend)
        cpu_seconds(trainer, 128)  # the first of all pays for more
        for number in range(lengths):
            length = 192 + 32 * number
            new = cpu_seconds(trainer, length, documents=length // WINDOW + 1 + number % 4)
            again = float(np.median([cpu_seconds(trainer, length) for _ in range(AGAIN)]))
            graphs = counters["stats"]["unique_graphs"]
            result.append({"length": length, "new": new, "again": again, "graphs": graphs})
        trainer.close()
    new, again = (float(np.median([r[which] for r in result])) for which in ("new", "again"))
    return {
        "layout": layout,
        "new": new,
        "again": again,
        "ratio": new / again,
        "graphs": graphs,
        "lengths": result,
    }


COLUMNS = {
    "layout": "{layout}",
    "new, s": "{new:.3f}",
    "again, s": "{again:.3f}",
    "ratio": "{ratio:.2f}",
    "graphs": "{graphs}",
}


@click.command()
@click.option("--layout", "layouts", multiple=True, type=click.Choice(LAYOUTS), default=DEFAULT)
@click.option("--lengths", default=8, show_default=True, help="How many different ones.")
@click.option("--compile", "backend", metavar="BACKEND", help="Compile the model: inductor, aot_eager.")
def main(layouts: tuple[str, ...], lengths: int, backend: str | None) -> None:
    """Seconds of processor time a micro-batch, for each layout in a process of its own."""
    measured = partial(measure, lengths=lengths, backend=backend)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as fresh:
        rows = show(COLUMNS, fresh.map(measured, layouts))
    if backend is None:
        save("new_lengths", rows)


if __name__ == "__main__":
    main()
