"""The examples of docstrings."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path for folder in ("wlb_titan", "kernels") for path in (ROOT / folder).rglob("*.py")]
MODULES = [path.relative_to(ROOT).with_suffix("") for path in FILES if ">>> " in path.read_text()]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_examples_give_what_they_say(module):
    name = ".".join(part for part in module.parts if part != "__init__")
    name = name if name.startswith("wlb_titan") else f"wlb_titan.{name}"
    found = doctest.testmod(import_module(name))
    assert found.attempted and not found.failed
