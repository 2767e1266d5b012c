"""Keys that travel among pairs, among all ranks or not at all give what one process gives."""

import json

import pytest
from forking import Rank


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_equals_one_process(fork_server, tmp_path, ranks):
    results, log = tmp_path / "results.json", tmp_path / "log"
    job = fork_server.start([Rank([str(results)], log)] * ranks, program="gather_worker")
    assert job.wait(300) == [0] * ranks, log.read_text()
    found = json.loads(results.read_text())
    assert len(found) > 50 * ranks
    assert not [result for result in found if not result["worst"] < 1e-12]
    assert all(result["used"][-1] for result in found if result["sliced"])
    used = {
        tuple(result["used"]) for result in found if result["policy"] == "hybrid" and not result["sliced"]
    }
    if ranks == 2:
        assert used == {(False,), (True,)}
    else:  # nothing, all four ranks, and pairs besides
        assert used >= {(False, False), (False, True), (True, True)}
