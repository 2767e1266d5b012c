"""examples/own_policies, installed as a user would: the commands find it, and wlb_titan stays as it is."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from commands import CONFIGS, ROOT, invoke, said

from wlb_titan import plugins

pytestmark = pytest.mark.slow

TABLE_1 = CONFIGS / "llama2_550m_64k.toml"
CPU = CONFIGS / "cpu_debug.toml"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_what_the_documentation_shows_in_python_is_python(page):
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        compile(block, page.name, "exec")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which the example is installed, from a copy, without a network."""
    folder, built = tmp_path_factory.mktemp("installed"), shutil.ignore_patterns("*.egg-info", "build")
    source = shutil.copytree(ROOT / "examples" / "own_policies", folder / "source", ignore=built)
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([sys.executable, *install, "--target", folder / "site", source], check=True)
    return folder / "site"


@pytest.fixture
def command(installed, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(installed)
    monkeypatch.chdir(tmp_path)
    plugins._installed.cache_clear()
    yield invoke
    plugins._installed.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_policies"]:
        del sys.modules[name]


@pytest.fixture
def lengths(tmp_path):
    values = np.random.default_rng(0).lognormal(5, 1.5, 3000).clip(5, 4096).astype(int)
    np.savetxt(tmp_path / "lengths.txt", values, fmt="%d")
    return tmp_path / "lengths.txt"


def test_plan_finds_them(command, lengths):
    words = "--training.seq_len 4096 --steps 5 --parallelism.context_parallel_degree 4"
    words += " --wlb.policy reversed/ulysses_gather --wlb.packing.every 2 --wlb.packing.cost_model tokens"
    output = said("plan", CPU, "--lengths", lengths, *words.split())
    assert "Work by tokens." in output
    assert re.search(r"^ *reversed/ulysses_gather ", output, re.MULTILINE)


@pytest.mark.long
def test_auto_and_simulate_have_them_among_the_candidates(command, lengths):
    words = ("--training.seq_len", 4096, "--steps", 2, "--policies", "auto/auto")
    output = said("simulate", TABLE_1, "--lengths", lengths, *words)
    for sharding in ("contiguous", "round_robin", "ulysses_gather"):
        assert f"reversed/{sharding}" in output


def test_their_keys_are_toml_keys(command, tmp_path):
    text = 'base = "llama3_debug"\nparallelism.context_parallel_degree = 4\n[wlb]\n'
    text += 'packing.every = 3\npolicy = "reversed/ulysses_gather"\ncontext.'

    def show(line):
        (tmp_path / "own.toml").write_text(f"{text}{line}\n")
        return command("config", "show", "own.toml", "--changed")

    shown, refused = show("within = 4"), show("within = 3")
    assert (shown.exit_code, refused.exit_code) == (0, 2), shown.stderr
    assert "within = 4" in shown.stdout and "every = 3" in shown.stdout
    assert "own.toml:6: wlb.context.within = 3: 4 context-parallel ranks cannot be divided" in refused.stderr
    assert "Did you mean wlb.context.within?" in show("witin = 2").stderr
