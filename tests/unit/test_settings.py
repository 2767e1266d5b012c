"""The reference of all settings: docs/settings.md, and `config show --explain`; and what `init` writes."""

import runpy

import pytest
from commands import CONFIGS, ROOT, invoke, said

from wlb_titan.commands.config import experiment
from wlb_titan.runtime.configured import degrees_product
from wlb_titan.runtime.models.load import load_config

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "settings.md").read_text()


def test_the_committed_page_is_current():
    page = runpy.run_path(str(ROOT / "docs" / "settings.py"))["page"]()
    assert page == PAGE, "run `python docs/settings.py`"


@pytest.mark.parametrize("folder", [CONFIGS, None], ids=["by path", "by name"])
def test_values_are_explained_in_the_words_of_the_page(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = str(folder / "cpu_debug.toml") if folder else "cpu_debug"
    words = "--wlb.policy wlb_lazy --wlb.corpus.sources [{path='a'}] --optimizer.param_groups.0.pattern .*"
    output = said("config", "show", file, "--explain", *words.split())
    text = " ".join(output.replace("\n# ", " ").split())
    for told in (
        "Iterations after which a document is packed, whatever the imbalance. (integer, at least 0; "
        "default 16) max_delay = 16",
        "each epoch has an order of its own. (integer, at least 0; default 0) seed = 0",
        '"PACKING/CONTEXT/ORDER", of which the last may be left out. policy = "wlb_lazy/',
        "(number, above 0; default 1.0) weight = 1.0",
        "How many train steps to run (integer; default 10000) steps =",  # torchtitan's own
    ):
        assert told in text, told
    (tmp_path / "explained.toml").write_text(output)
    again = load_config(tmp_path / "explained.toml")
    assert again.config.wlb == load_config(ROOT / "train_configs/cpu_debug.toml", words.split()).config.wlb


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
