"""The command `wlb-titan`: quick help, lazy subcommands, and errors that a person can read."""

import subprocess
import sys
import warnings

import click
import pytest
from click.testing import CliRunner

from wlb_titan import __version__
from wlb_titan.commands.main import SUBCOMMANDS, main
from wlb_titan.errors import UserError

HEAVY = {"torch", "torchtitan", "torchx", "datasets", "numpy", "pyarrow", "tokenizers", "rich", "pandas"}


@click.command()
@click.argument("what")
def fail(what: str) -> None:
    """A subcommand that fails in the way it is told to."""
    if what == "user":
        raise UserError("The file is missing. Make one.")
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "warning":
        for text in ("twice", "once", "twice"):
            warnings.warn(text, stacklevel=1)
    if what == "defect":
        raise ValueError("not meant for the user")


@pytest.fixture
def failing(monkeypatch):
    monkeypatch.setitem(SUBCOMMANDS, "fail", "Fail.")
    monkeypatch.setitem(sys.modules, "wlb_titan.commands.fail", sys.modules[__name__])


def test_help_lists_every_subcommand():
    lines = [line.split() for line in CliRunner().invoke(main, ["--help"]).stdout.splitlines()]
    for name, text in SUBCOMMANDS.items():
        assert [name, *text.split()] in lines


@pytest.mark.slow
def test_help_imports_nothing_heavy():
    """So it answers at once."""
    code = (
        "import sys\nfrom wlb_titan.commands.main import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print('imported:', *{name.split('.')[0] for name in sys.modules})"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    imported = set(output.rpartition("imported:")[2].split())
    assert "click" in imported
    assert not HEAVY & imported


@pytest.mark.slow
@pytest.mark.parametrize("words", [["nowhere.toml"], ["--config", "job.toml"]], ids=" ".join)
def test_a_file_that_is_not_there_is_told_without_torch(words):
    code = (
        "import sys\nfrom wlb_titan.commands.main import main\n"
        f"try: main(['train', *{words!r}])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "2 False\n"
    assert f"{words[0]}: there is no such file. It comes first" in result.stderr


def test_version():
    result = CliRunner().invoke(main, ["--version"])
    assert result.output == f"wlb-titan, version {__version__}\n"


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_of_the_table_explains_itself(name):
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: main {name} ")
    options = main.get_command(click.Context(main), name).params
    assert all(option.help for option in options if isinstance(option, click.Option))


def test_unknown_subcommand():
    result = CliRunner().invoke(main, ["prepair"])
    assert result.exit_code == 2
    assert "No such command 'prepair'" in result.stderr


@pytest.mark.usefixtures("failing")
def test_a_users_mistake_is_a_message_and_exit_code_2():
    result = CliRunner().invoke(main, ["fail", "user"])
    assert (result.exit_code, result.stderr) == (2, "Error: The file is missing. Make one.\n")


@pytest.mark.usefixtures("failing")
def test_a_warning_is_a_line_that_comes_once():
    result = CliRunner().invoke(main, ["fail", "warning"])
    assert (result.exit_code, result.stderr) == (0, "Warning: twice\nWarning: once\n")


@pytest.mark.usefixtures("failing")
def test_ctrl_c_is_one_line_and_exit_code_130():
    result = CliRunner().invoke(main, ["fail", "interrupt"])
    assert (result.exit_code, result.stderr) == (130, "\nInterrupted.\n")


@pytest.mark.usefixtures("failing")
def test_a_defect_keeps_its_traceback():
    result = CliRunner().invoke(main, ["fail", "defect"])
    assert isinstance(result.exception, ValueError)
    assert not isinstance(result.exception, SystemExit)
