"""[wlb.corpus] in TOML: other tools' corpora and mixtures of them, as `config check` and `plan` see them."""

from pathlib import Path

import datasets
import numpy as np
import pytest
from click.testing import CliRunner

from wlb_titan.commands.main import main
from wlb_titan.corpus.tokenizer import train_tokenizer

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    train_tokenizer(["some words"], 300, folder / "tokenizer")
    for name, count, most in (("short", 300, 40), ("long", 60, 900)):
        ids = [RNG.integers(0, 250, RNG.integers(2, most)).tolist() for _ in range(count)]
        datasets.Dataset.from_dict({"input_ids": ids}).save_to_disk(folder / name)
    datasets.Dataset.from_dict({"input_ids": [[5, 999]] * 20}).save_to_disk(folder / "wrong")
    return folder


def config(folder: Path, tmp_path: Path, sources: str, tokenizer: str = "tokenizer") -> Path:
    path = tmp_path / "train.toml"
    path.write_text(
        'base = "llama3_debug"\ntraining.seq_len = 256\ntraining.global_batch_size = 4\n'
        + f'wlb.corpus.tokenizer = "{folder / tokenizer}"\n'
        + sources.replace("FOLDER", str(folder))
    )
    return path


MIXTURE = """
[[wlb.corpus.sources]]
path = "FOLDER/short"
weight = 1.0
[[wlb.corpus.sources]]
path = "FOLDER/long"
name = "books"
weight = 3.0
long_length = 400
long_share = 0.9
"""


def test_plan_shows_what_a_mixture_does(folder, tmp_path):
    path = config(folder, tmp_path, MIXTURE)
    assert run("config", "check", path)[0] == 0
    code, output = run("plan", path, "--compare", "plain,wlb_lazy", "--steps", 20, "--report", tmp_path / "r")
    assert code == 0, output
    assert "a mixture of short, long: 360 documents" in output
    assert "short: 25.0% of the tokens; has 300 documents" in output
    assert "books: 75.0% of the tokens; has 60 documents" in output
    assert "90.0% from the" in output
    assert "How a mixture of short, long packs" in (tmp_path / "r" / "report.html").read_text()
    code, output = run("simulate", path, "--cluster", "cpu", "--steps", 2, "--policies", "plain,wlb_lazy")
    assert code == 0, output


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (
            MIXTURE.replace("FOLDER/long", "FOLDER/nowhere"),
            "There is no corpus at",
        ),
        (MIXTURE.replace("0.9", "1.9"), "long_share = 1.9: expected a number, above 0 and below 1"),
        (MIXTURE.replace("long_share = 0.9", ""), "only one of long_length and long_share"),
        (MIXTURE.replace('"books"', '"short"'), "The sources are called short, short"),
        (MIXTURE.replace("weight = 3.0", "weigth = 3.0"), "Did you mean wlb.corpus.sources.1.weight?"),
        ('wlb.corpus.path = "FOLDER/wrong"', "Document 0 (data-00000-of-00001.arrow[0])"),
        ('wlb.corpus.path = "FOLDER/long"\nwlb.corpus.column = "text"', "has no column 'text'"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_place(folder, tmp_path, sources, message):
    code, output = run("config", "check", config(folder, tmp_path, sources))
    assert code == 2
    assert message in output
