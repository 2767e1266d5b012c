"""Runs interpreted.py, the checks of the kernels' arithmetic, under Triton's interpreter.

In a process of their own, because TRITON_INTERPRET is read when Triton is imported and would change every
other test of this one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("interpreted.py")


@pytest.mark.timeout(900)
def test_interpreted():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
