"""200 steps of a pipeline on four processes, with random lengths and numbers of micro-batches.

Not among the tests that `make test` collects, because it takes minutes; run it with

    pytest -s tests/distributed/soak_pipeline.py
"""

import ctypes
import gc

import numpy as np
import pytest
from lab import Cases, make_corpus

STEPS = 200


@pytest.mark.timeout(3600)
def test_nothing_hangs_and_nothing_grows(tmp_path, fork_server):
    make_corpus(tmp_path / "documents.jsonl", tmp_path / "corpus")
    results = Cases(fork_server, tmp_path, tmp_path / "corpus")
    words = ["--loss.num_chunks", "2", "--training.local_batch_size", "8"]
    results.run("soak", {"pp2 cp2 1F1B": {"words": words}}, timeout=3600)
    records = results["pp2 cp2 1F1B"]
    print(*records, sep="\n")
    assert records[-1]["step"] == STEPS
    middle, last = records[len(records) // 2], records[-1]
    assert last["allocated"] < middle["allocated"] + 1  # MiB


def run(*, name, words):
    """Steps of random lengths, as a case of `worker.py`; "lengths" counts the different ones so far, and
    "allocated" is what malloc has given out, in MiB."""
    from pipeline_reference import step_data
    from worker import build, train_step

    trainer = build(words)
    random = np.random.default_rng(0)
    seen, records = set(), []
    for step in range(STEPS):
        lengths = (8 * random.integers(2, 33, size=random.integers(4, 13))).tolist()
        seen.update(lengths)
        trainer.optimizers.zero_grad()
        train_step(trainer, step_data(step, lengths, 1))
        trainer.optimizers.step()
        if step % 10 == 9:
            gc.collect()
            records.append({"step": step + 1, "lengths": len(seen), "allocated": allocated() / 2**20})
    trainer.close()
    return records


def allocated():
    fields = {"_fields_": [(f"field{i}", ctypes.c_size_t) for i in range(10)]}
    library = ctypes.CDLL("libc.so.6")
    library.mallinfo2.restype = type("mallinfo2", (ctypes.Structure,), fields)
    information = library.mallinfo2()
    return information.field7 + information.field4  # uordblks and hblkhd
