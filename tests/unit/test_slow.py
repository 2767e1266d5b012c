"""`make quick` leaves out what takes long: files that import torchtitan, as the runtime does, and jobs."""

import re
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.glob("test_*.py"))
IMPORTS = re.compile(
    r"^(from|import) (torchtitan|wlb_titan\.runtime(?!\.cpu_device|\.attention\.kv_cache))", re.MULTILINE
)
STARTS = re.compile(r"\bsubprocess\.\w+\(|\bPopen\(|\bforked_ranks\b|\bfork_server\b")


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_what_takes_long_is_marked(path):
    text = path.read_text()
    if IMPORTS.search(text):
        assert "pytestmark = pytest.mark.slow" in text
    elif STARTS.search(text):
        assert "pytest.mark.slow" in text
