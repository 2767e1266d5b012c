"""200 steps of a pipeline on four processes, with random lengths and numbers of micro-batches.

Not among the tests that `make test` collects, because it takes minutes; run it with

    pytest -s tests/distributed/soak_pipeline.py
"""

import json
import os
import subprocess

import pytest
from conftest import TESTS, make_corpus, torchrun

STEPS = 200


@pytest.mark.timeout(3600)
def test_nothing_hangs_and_nothing_grows(tmp_path):
    make_corpus(tmp_path / "documents.jsonl", tmp_path / "corpus")
    results = tmp_path / "results.json"
    case = {"kind": "soak", "name": "soak", "schedule": "1F1B", "layers": 2, "pp": 2, "cp": 2}
    case |= {"steps": STEPS, "multiple": 8}
    jobs = {"corpus": str(tmp_path / "corpus"), "results": str(results), "cases": [case]}
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    launch = subprocess.run(
        torchrun(4, str(TESTS / "pipeline_worker.py"), str(tmp_path / "jobs.json")),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert launch.returncode == 0
    records = json.loads(results.read_text())["soak"]
    assert records[-1]["step"] == STEPS
    middle, last = records[len(records) // 2], records[-1]
    assert last["allocated"] < middle["allocated"] + 1  # MiB
