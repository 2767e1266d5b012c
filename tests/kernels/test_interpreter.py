"""interpreted.py, the checks of the kernels' arithmetic, under Triton's interpreter.

In a process of its own, because TRITON_INTERPRET is read when Triton is imported and would change every other
test of this one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SEGMENTS = "test_cases or test_windows"


def interpret(expression: str) -> None:
    """The tests of interpreted.py that `pytest -k` selects by the expression; none is a failure too."""
    file = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), "-k", expression]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_all_but_the_cases_of_segments():
    interpret(f"not ({SEGMENTS})")


@pytest.mark.long
def test_every_case_of_segments_and_window():
    interpret(SEGMENTS)
