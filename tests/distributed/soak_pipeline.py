"""200 steps of a pipeline on four processes, with random lengths and numbers of micro-batches.

Not among the tests that `make test` collects, because it takes minutes; run it with

    pytest -s tests/distributed/soak_pipeline.py
"""

import json

import pytest
from forking import Rank
from lab import first_failure, make_corpus

STEPS = 200


@pytest.mark.timeout(3600)
def test_nothing_hangs_and_nothing_grows(tmp_path, fork_server):
    make_corpus(tmp_path / "documents.jsonl", tmp_path / "corpus")
    results, log = tmp_path / "results.json", tmp_path / "soak.log"
    case = {"kind": "soak", "name": "soak", "schedule": "1F1B", "layers": 2, "pp": 2, "cp": 2}
    case |= {"steps": STEPS, "multiple": 8}
    jobs = {"corpus": str(tmp_path / "corpus"), "results": str(results), "cases": [case]}
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    job = fork_server.start([Rank([str(tmp_path / "jobs.json")], log)] * 4, program="pipeline_worker")
    assert not any(job.wait(3600)), first_failure(log)
    records = json.loads(results.read_text())["soak"]
    print(*records, sep="\n")
    assert records[-1]["step"] == STEPS
    middle, last = records[len(records) // 2], records[-1]
    assert last["allocated"] < middle["allocated"] + 1  # MiB
