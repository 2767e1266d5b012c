"""`wlb-titan`, as a user types it, and programs on processes; and where the repository's files are."""

import json
import os
import subprocess
import sys
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


def on_processes(number, program, *paths, cwd=None, **environment):
    """What a program on so many processes prints last, from JSON; `paths` are looked through for modules."""
    path = os.pathsep.join(filter(None, [*map(str, paths), os.environ.get("PYTHONPATH")]))
    launcher = ("torch.distributed.run", "--nproc-per-node", str(number), "--standalone")
    how = {"cwd": cwd, "env": os.environ | {"PYTHONPATH": path} | environment, "timeout": 600}
    words = [sys.executable, "-m", *launcher, program]
    done = subprocess.run(words, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
