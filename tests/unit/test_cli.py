"""The command `wlb-titan`: quick help, lazy subcommands, and errors that a person can read."""

import os
import subprocess
import sys
import warnings

import click
import pytest
from click.testing import CliRunner
from commands import invoke

from wlb_titan import __version__
from wlb_titan.commands.main import SUBCOMMANDS, main
from wlb_titan.errors import UserError, refusing
from wlb_titan.runtime import one_rank

HEAVY = {"torch", "torchtitan", "torchx", "datasets", "numpy", "pyarrow", "tokenizers", "rich", "pandas"}
LIGHT = {
    "main(['--help'])": {*HEAVY, "pydantic"},
    "import wlb_titan.corpus": {"torch", "torchtitan", "datasets", "tokenizers", "pandas"},
    "import wlb_titan.prepare.prepare, wlb_titan.commands.prepare": {"torch", "torchtitan", "datasets"},
    "import wlb_titan.config.settings, wlb_titan.commands.config": {"torch", "torchtitan", "rich"},
}
"""Programs, and packages that they leave alone, so that they begin at once."""


def fresh(program: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """What a new Python does, which has imported nothing yet, and what it has imported in the end."""
    code = (
        "import atexit, sys\natexit.register(lambda: print('imported:', *sys.modules))\n"
        f"from wlb_titan.commands.main import main\n{program}"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    imported = set(result.stdout.rpartition("imported:")[2].split())
    assert "wlb_titan" in imported, result.stderr
    return result, imported


@pytest.mark.slow
@pytest.mark.parametrize("program", LIGHT)
def test_what_takes_long_to_import_is_not_imported(program):
    result, imported = fresh(program)
    assert result.returncode == 0, result.stderr
    assert not LIGHT[program] & imported


@pytest.mark.slow
@pytest.mark.parametrize("words", [["nowhere.toml"], ["--config", "nowhere.toml"], ["--config=nowhere.toml"]])
def test_a_file_that_is_not_there_is_told_without_torch(words):
    result, imported = fresh(f"main(['train', *{words!r}])")
    assert result.returncode == 2 and "torch" not in imported
    assert "nowhere.toml: there is no such file. Give the file first" in result.stderr


def test_help_lists_every_subcommand_and_there_is_a_version():
    said = invoke("--version").output
    assert said == f"wlb-titan, version {__version__}\n"
    lines = [line.split() for line in invoke("--help").stdout.splitlines()]
    for name, (_, text) in SUBCOMMANDS.items():
        assert [name, *text.split()] in lines


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_of_the_table_explains_itself(name):
    result = invoke(name, "--help")
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: main {name} ")
    options = main.get_command(click.Context(main), name).params
    assert all(option.help for option in options if isinstance(option, click.Option))


@click.command()
@click.argument("what")
def fail(what: str) -> None:
    """A subcommand that fails in the way it is told to."""
    if what == "mistake":
        raise UserError("The file is missing. Make one.")
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "defect":
        raise ValueError("not meant for the user")
    if what == "signs":
        click.echo("± –")
    for text in ("twice", "once", "twice"):
        warnings.warn(text, stacklevel=1)


@pytest.fixture
def failing(monkeypatch):
    monkeypatch.setitem(SUBCOMMANDS, "fail", ("fail", "Fail."))
    monkeypatch.setitem(sys.modules, "wlb_titan.commands.fail", sys.modules[__name__])
    return lambda what, **how: CliRunner(**how).invoke(main, ["fail", what])


TOLD = {"mistake": (2, "Error: The file is missing. Make one.\n"), "interrupt": (130, "\nInterrupted.\n")}
TOLD["warnings"] = (0, "Warning: twice\nWarning: once\n")


@pytest.mark.parametrize("what", TOLD)
def test_what_concerns_the_user_is_told_once_in_a_line(failing, what):
    result = failing(what)
    assert (result.exit_code, result.stderr) == TOLD[what]


def test_signs_that_an_encoding_lacks_are_no_error_and_a_defect_keeps_its_traceback(failing):
    assert failing("signs", charset="latin-1").stdout_bytes == b"\xb1 ?\n"
    assert isinstance(failing("defect").exception, ValueError)


@pytest.mark.parametrize("defect", [NameError, AssertionError])
def test_a_defect_of_a_reader_is_not_taken_for_a_damaged_file(defect):
    with pytest.raises(defect), refusing(UserError):
        raise defect


def test_a_full_disk_behind_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "wlb_titan.commands.main", "--help"]
        result = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2
    assert result.stderr == "Error: The output cannot be written: No space left on device.\n"


@pytest.mark.slow
def test_ranks_run_side_by_side_as_cores_and_memory_allow(monkeypatch, tmp_path):
    """On a host of 192 cores, in a container with the time of four, or with 3 GiB; `init` counts alike."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(192))
    monkeypatch.setattr(one_rank, "CGROUP", tmp_path)
    free = one_rank.at_once()
    assert 1 <= free <= max(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30, 1)
    for cores, bytes_, most in (("max", "max", 192), (400000, "max", 4), (400000, 3 << 30, 3), (5, "max", 1)):
        (tmp_path / "cpu.max").write_text(f"{cores} 100000\n")
        (tmp_path / "memory.max").write_text(f"{bytes_}\n")
        assert one_rank.at_once() == min(free, most)
        (file := tmp_path / "job.toml").unlink(missing_ok=True)
        monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)
        assert invoke("init", file).exit_code == 0
        processes = next(number for number in (4, 2, 1) if number <= min(free, most))
        assert f"data_parallel_shard_degree = {processes} " in file.read_text()
