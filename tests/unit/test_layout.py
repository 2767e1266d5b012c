"""The dependency rule: which part of the project may import what."""

import ast
from pathlib import Path

import pytest
import tomli

ROOT = Path(__file__).parents[2]
STANDARD_LIBRARY_AND = {
    "kernels": {"torch", "triton", "numpy", "wlb_titan.kernels"},
    "wlb_titan/planner": {"numpy", "highspy", "wlb_titan.planner", "wlb_titan.errors"},
    "wlb_titan/simulator": {
        *("numpy", "wlb_titan.simulator", "wlb_titan.planner", "wlb_titan.errors", "wlb_titan.timeline"),
    },
    "wlb_titan/corpus": {
        *("numpy", "pyarrow", "datasets", "tokenizers", "wlb_titan.corpus", "wlb_titan.errors"),
    },
}
THIRD_PARTY = {
    *("torch", "triton", "numpy", "scipy", "torchtitan", "torchx", "datasets", "tokenizers", "pyarrow"),
    *("click", "rich", "tomli", "matplotlib", "highspy", "pandas", "wlb_titan"),
}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in THIRD_PARTY}


def within(name: str, allowed: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in allowed)


@pytest.mark.parametrize("folder", STANDARD_LIBRARY_AND)
def test_parts_know_only_what_they_may(folder):
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for file in files:
        strangers = {name for name in imports(file) if not within(name, STANDARD_LIBRARY_AND[folder])}
        assert not strangers, f"{file.relative_to(ROOT)} imports {sorted(strangers)}"


def test_only_the_runtime_imports_torchtitan():
    for folder in ("wlb_titan", "kernels", "launch"):
        for file in (ROOT / folder).rglob("*.py"):
            if (ROOT / "wlb_titan" / "runtime") not in file.parents:
                assert not any(within(name, {"torchtitan"}) for name in imports(file)), file


def test_importing_the_package_imports_nothing_else():
    assert imports(ROOT / "wlb_titan" / "__init__.py") == set()


def test_every_package_is_installed():
    """setuptools takes the packages from a list; one that is missing there is missing in a wheel."""
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {file.parent for file in (ROOT / "wlb_titan").rglob("__init__.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(project["packages"]) == names | {"wlb_titan.kernels", "wlb_titan.launch"}
