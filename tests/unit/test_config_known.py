"""Misspelt keys are found before torchtitan is imported, in the words that the whole check has for them."""

import subprocess
import sys
from pathlib import Path

import pytest

import wlb_titan.config.known as known
from wlb_titan.config import ConfigError, refuse_unknown_keys
from wlb_titan.runtime.models.load import load_config

FILES = sorted((Path(__file__).parents[2] / "train_configs").glob("*.toml"))
WRONG = {
    "misspelt": "[training]\nsetps = 3",
    "of another section": "[training]\ncontext_parallel_degree = 2",
    "in the wrong place": "optimizer.lr = 3e-4",
    "section": "[paralelism]\ntensor_parallel_degree = 2",
    "of ours": "[wlb.packing]\npolice = 'plain'",
    "of ours, in a list": "[[wlb.corpus.sources]]\npath = 'x'\nwieght = 2",
    "value of ours": "[wlb.packing]\npolicy = 'fancy'",
    "two layers deep": "[checkpoint]\nenable = true\nintervall = 3",
}
LEFT_TO_THE_REST = {
    "class": '[activation_checkpoint]\nclass = "FullAC"\nno_key_of_it = 1',
    "list": "[[optimizer.param_groups]]\npatern = 'x'",
    "value of torchtitan's": "training.steps = 'many'",
}


@pytest.fixture
def file(tmp_path):
    def write(text, base="llama3_debug"):
        path = tmp_path / "t.toml"
        path.write_text(f'base = "{base}"\n{text}\n')
        return path

    return write


def message(check, path):
    with pytest.raises(ConfigError) as caught:
        check(path)
    return str(caught.value)


def test_the_stored_keys_are_those_of_the_bases():
    from wlb_titan.runtime.checks.known_keys import text

    stored = Path(known.__file__).with_name(known.FILE_NAME).read_text()
    assert stored == text(), "write them anew: python -m wlb_titan.runtime.checks.known_keys"


@pytest.mark.parametrize("case", WRONG)
def test_the_words_are_those_of_the_whole_check(file, monkeypatch, case):
    path = file(WRONG[case])
    early = message(refuse_unknown_keys, path)
    monkeypatch.setattr("wlb_titan.runtime.models.load.refuse_unknown_keys", lambda *_: None)
    assert message(load_config, path) == early


@pytest.mark.parametrize("case", LEFT_TO_THE_REST)
def test_what_is_not_known_beforehand_is_found_later(file, case):
    path = file(LEFT_TO_THE_REST[case])
    refuse_unknown_keys(path)
    message(load_config, path)


def test_other_bases_may_have_other_keys(file):
    refuse_unknown_keys(file("[training]\nsetps = 3", base="my.package:base"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_right_files_pass(path):
    refuse_unknown_keys(path, ["--optimizer.param_groups.0.optimizer_kwargs.lr", "1e-3"])


def test_torch_is_not_imported_for_it(file):
    code = (
        "import sys\nfrom wlb_titan.errors import ConfigError\n"
        "from wlb_titan.runtime.models.load import load_config\n"
        f"try:\n    load_config({str(file(WRONG['misspelt']))!r})\nexcept ConfigError:\n"
        "    print('torch' in sys.modules or 'torchtitan' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr
