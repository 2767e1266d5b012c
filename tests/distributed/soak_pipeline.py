"""200 steps of a pipeline on four processes, with random lengths and numbers of micro-batches.

Not among the tests that `make test` collects, because it takes minutes; run it with

    pytest -s tests/distributed/soak_pipeline.py
"""

import pytest
from lab import Cases, make_corpus

STEPS = 200


@pytest.mark.timeout(3600)
def test_nothing_hangs_and_nothing_grows(tmp_path, fork_server):
    make_corpus(tmp_path / "documents.jsonl", tmp_path / "corpus")
    case = {"kind": "soak", "schedule": "1F1B", "layers": 2, "pp": 2, "cp": 2, "steps": STEPS, "multiple": 8}
    results = Cases(fork_server, tmp_path)
    cases = {"soak": case | {"corpus": str(tmp_path / "corpus")}}
    results.run(cases, program="pipeline_worker", timeout=3600)
    records = results["soak"]
    print(*records, sep="\n")
    assert records[-1]["step"] == STEPS
    middle, last = records[len(records) // 2], records[-1]
    assert last["allocated"] < middle["allocated"] + 1  # MiB
