"""Keys that travel among pairs, among all ranks or not at all give what one process gives."""

import pytest
from lab import Cases


@pytest.fixture(scope="module")
def results(fork_server, tmp_path_factory):
    results = Cases(fork_server, tmp_path_factory.mktemp("gathered"))
    results.run("gather", {"cp2": {}, "cp4": {}})
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_equals_one_process(results, ranks):
    found = results[f"cp{ranks}"]
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
