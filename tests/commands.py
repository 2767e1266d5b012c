"""`wlb-titan`, as a user types it."""

from click.testing import CliRunner

from wlb_titan.commands.main import main


def invoke(*words):
    return CliRunner().invoke(main, list(map(str, words)))
