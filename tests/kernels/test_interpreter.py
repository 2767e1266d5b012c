"""Runs interpreted.py, the checks of the kernels' arithmetic, under Triton's interpreter.

In processes of their own, because TRITON_INTERPRET is read when Triton is imported and would change every
other test of this one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FILE = Path(__file__).with_name("interpreted.py")


@pytest.mark.parametrize("part", ["ragged or masks", "not (ragged or masks)"])
def test_interpreted(part):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", part, str(FILE)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
