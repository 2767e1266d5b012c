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
    case = {"schedule": "1F1B", "layers": 2, "pp": 2, "cp": 2, "steps": STEPS, "multiple": 8}
    results = Cases(fork_server, tmp_path)
    cases = {"soak": case | {"corpus": str(tmp_path / "corpus")}}
    results.run(cases, program="soak_pipeline", timeout=3600)
    records = results["soak"]
    print(*records, sep="\n")
    assert records[-1]["step"] == STEPS
    middle, last = records[len(records) // 2], records[-1]
    assert last["allocated"] < middle["allocated"] + 1  # MiB


def main():
    """As a worker: what the process holds, every tenth step."""
    from cases import run_cases
    from pipeline_worker import end

    run_cases(run_soak)
    end()


def run_soak(*, name, corpus, steps, multiple, **options):
    """Steps of random lengths, multiples of `multiple`; "lengths" counts the different ones so far, and
    "allocated" is what malloc has given out, in MiB."""
    from pipeline_reference import step_data
    from pipeline_worker import SEQUENCE, build, train_step

    _, trainer = build(corpus, name, micro_batches=8, **options)
    random = np.random.default_rng(0)
    seen, records = set(), []
    for step in range(steps):
        lengths = random.integers(16 // multiple, SEQUENCE // multiple + 1, size=random.integers(4, 13))
        lengths = (multiple * lengths).tolist()
        seen.update(lengths)
        trainer.optimizers.zero_grad()
        train_step(trainer, step_data(step, lengths, 1), 0)
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
