"""The other half of interpreted.py: see test_interpreter.py."""

import pytest
from test_interpreter import SEGMENTS, interpret


@pytest.mark.long
def test_every_case_of_segments_and_window():
    interpret(SEGMENTS)
