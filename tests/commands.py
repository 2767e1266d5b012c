"""`wlb-titan`, as a user types it; and where the repository's files are."""

from pathlib import Path

from click.testing import CliRunner

from wlb_titan.commands.main import main

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "train_configs"


def invoke(*words):
    return CliRunner().invoke(main, list(map(str, words)))


def said(*words):
    """What it prints; it has to succeed."""
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return result.output
