"""`make quick` leaves out what takes long: a file that imports torchtitan says so by the line `SLOW`, and
what starts processes is marked too."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

SLOW = "pytestmark = pytest.mark.slow"
ROOT = Path(__file__).parents[2]
FOLDERS = {
    "wlb_titan.kernels": ROOT / "kernels",
    "wlb_titan.launch": ROOT / "launch",
    "wlb_titan": ROOT / "wlb_titan",
}
FILES = sorted(Path(__file__).parent.glob("test_*.py"))
STARTS = re.compile(r"\bsubprocess\.\w+\(|\bPopen\(|\bforked_ranks\b|\bfork_server\b")


@cache
def imports(path: Path) -> frozenset[str]:
    """The modules that a file imports at its top."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def file_of(module: str) -> Path | None:
    """None for modules of others."""
    for package, folder in FOLDERS.items():
        if module == package or module.startswith(f"{package}."):
            path = folder.joinpath(*module.removeprefix(package).split("."))
            files = (path.with_suffix(".py"), path / "__init__.py")
            return next((file for file in files if file.is_file()), None)
    return None


def imports_torchtitan(path: Path) -> bool:
    """Whether it does itself, or a module of ours that it imports."""
    left, seen = set(imports(path)), set()
    while left:
        name = left.pop()
        if name.split(".")[0] == "torchtitan":
            return True
        file = file_of(name)
        if file is not None and file not in seen:
            seen.add(file)
            left |= imports(file)
    return False


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_what_takes_long_is_marked(path):
    text = path.read_text()
    if imports_torchtitan(path):
        assert SLOW in text
    elif STARTS.search(text):
        assert "pytest.mark.slow" in text
