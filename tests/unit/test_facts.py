"""What is kept of a configuration is what it means, and only as long as it does."""

import subprocess
import sys
from pathlib import Path

import pytest

import wlb_titan.runtime.models.facts as facts
from wlb_titan.errors import ConfigError
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator
from wlb_titan.runtime.models.facts import facts_of
from wlb_titan.runtime.models.load import load_config

use_cpu_without_accelerator()

from wlb_titan.runtime.job import configured_job, parallel_dims  # noqa: E402

pytestmark = pytest.mark.slow

FILES = sorted((Path(__file__).parents[2] / "train_configs").glob("*.toml"))
TOML = 'base = "llama3_debug"\n[wlb]\ncluster = "mine.toml"\n'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "wlb_titan" / "facts"


@pytest.fixture
def kept(monkeypatch):
    """What is kept of a configuration; None where it must be found anew."""

    def read(path, *overrides):
        return facts._read(facts._place(path, overrides, None))

    return read


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_kept_is_what_is_found(path, kept):
    assert kept(path) is None
    found = facts_of(path)
    quick = kept(path)
    assert quick == found
    slow = load_config(path)
    assert quick.job == configured_job(slow.config, parallel_dims(slow.config))
    assert quick.resolved.provenance == slow.provenance
    assert [entry.text for entry in quick.resolved.entries] == [entry.text for entry in slow.entries]
    assert quick.wlb == slow.config.wlb
    assert quick.resolved.config.training.seq_len == slow.config.training.seq_len
    assert kept(path, "--training.steps", "5") is None


def test_a_change_is_seen(tmp_path, kept, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = Path(facts.__file__).parents[2] / "cost" / "clusters" / "cpu.toml"
    Path("mine.toml").write_text(shipped.read_text())
    Path("base.toml").write_text(TOML)
    Path("job.toml").write_text('extends = "base.toml"\n')
    facts_of("job.toml")
    assert kept("job.toml") is not None
    Path("base.toml").write_text(TOML + "trace_every = 2\n")
    assert kept("job.toml") is None
    assert facts_of("job.toml").wlb.trace_every == 2
    Path("mine.toml").write_text("# slower\n" + shipped.read_text())
    assert kept("job.toml") is None, "of a file that a value names"
    facts_of("job.toml")
    for entry in cache.iterdir():
        entry.write_bytes(entry.read_bytes()[:-9])
    assert kept("job.toml") is None, "a damaged entry"
    assert facts_of("job.toml").job.cluster.name


def test_nothing_is_kept_of_what_others_decide_or_is_refused(tmp_path, kept, cache):
    path = tmp_path / "job.toml"
    path.write_text('base = "llama3_debug"\n[wlb.packing]\npolicy = "toys:Reversed"\n')
    assert facts_of(path).job.packing.owner.__module__ == "toys"
    path.write_text('base = "toys_of_mine:base"\n')
    with pytest.raises(ConfigError):
        facts_of(path)
    assert not cache.exists()
    path.write_text('base = "llama3_debug"\n')
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder would be")
    assert facts_of(path).job.window == 1024


def test_a_second_look_imports_no_torch(tmp_path, cache):
    facts_of(FILES[0])
    code = (
        "import sys\nfrom wlb_titan.commands.job import load_job\n"
        f"print(load_job({str(FILES[0])!r}, lengths='web').job.window)\n"
        "print('torch' in sys.modules, 'torchtitan' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split()[1:] == ["False", "False"], result.stderr
