"""`wlb-titan init`: what it writes is a job that can run."""

import pytest
from commands import invoke

from wlb_titan.commands.config import experiment
from wlb_titan.runtime.configured import degrees_product
from wlb_titan.runtime.models.load import load_config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("gpus", "cores", "ranks"), [(0, 1, 1), (0, 64, 4), (1, 64, 1), (6, 64, 4), (8, 64, 8)]
)
def test_the_experiment_is_valid_on_any_machine(tmp_path, gpus, cores, ranks):
    file = tmp_path / "job.toml"
    corpus = 'a "corpus" \\ of mine'
    file.write_text(experiment(str(file), corpus, gpus, cores))
    config = load_config(file, world_size=ranks).config
    assert config.wlb.corpus.path == corpus
    assert degrees_product(config) == ranks
    assert config.training.mixed_precision_param == ("bfloat16" if gpus else "float32")


def test_a_file_that_is_there_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = invoke("init")
    assert first.exit_code == 0 and "wlb-titan train job.toml" in first.output
    before = (tmp_path / "job.toml").read_text()
    again = invoke("init", "--corpus", "other")
    assert again.exit_code == 2 and "job.toml already exists" in again.output
    assert (tmp_path / "job.toml").read_text() == before
