"""The dependency rule: which part of the project may import what."""

import ast
import re
import sys
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from itertools import chain, takewhile
from pathlib import Path

import pytest
import tomli

ROOT = Path(__file__).parents[2]
ROOMS = (
    {"errors": 92, "progress": 20, "arrays": 8, "plugins": 257, "plan": 292, "bins": 218}
    | {"toml": 715, "files": 62}
    | {"documents": 659, "pipeline": 703, "cost": 1_252, "dimensions": 335}
    | {"context": 1_374, "layers": 996, "memory": 1_102, "balancing": 290, "packing": 3_077}
    | {"sampler": 120, "planner": 231, "job": 38, "summary": 193}
    | {"simulator": 1_503, "runs": 242, "corpus": 966, "prepare": 1_364, "config": 617}
    | {"runtime": 8_280, "commands": 2_863}
)
"""Of wlb_titan, from the ground up, with their lines: a room imports from those before it, inside functions
too, and what is added to one removes something of it."""

OTHERS = {"__init__": 24, "kernels": 3_279, "launch": 530}

MAY_USE = {
    "kernels": {"torch", "triton", "numpy"},
    "cost": {"numpy", "wlb_titan.kernels.fastest"},  # which has no torch
    "corpus": {"numpy", "pyarrow", "datasets", "transformers"},
    "prepare": {"numpy", "pyarrow", "datasets", "filelock", "tokenizers", "transformers"},
    "packing": {"numpy", "highspy"},
    "toml": {"tomli", "pydantic"},
    "files": {"pydantic"},
    "runtime": {"torch", "torchtitan", "numpy", "click", "tokenizers", "transformers", "wlb_titan.kernels"},
    "commands": {
        *("torch", "triton", "numpy", "tomli", "click", "jinja2", "rich", "tokenizers"),
        *("wlb_titan.kernels", "wlb_titan.launch"),
    },
}
"""Third-party packages by room; any other has numpy."""

MAY_NAME = {"context": "wlb_titan.runtime.attention", "cost": "wlb_titan.layers.passes"}
"""What strings may name besides: the half of a sharding policy that moves tensors, as it is loaded where it
trains, and planning imports no torch; and the cost model that adds up passes."""

THIRD_PARTY = {
    *("torch", "triton", "numpy", "scipy", "torchtitan", "torchx", "datasets", "tokenizers", "pyarrow"),
    *("filelock", "jinja2", "transformers"),
    *("click", "rich", "tomli", "highspy", "pydantic", "pandas", "wlb_titan"),
}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(nodes: Iterable[ast.AST]) -> set[str]:
    """What is imported, of modules also their names, inside functions too."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def known(path: Path) -> set[str]:
    """What a file imports, and what it is annotated with."""
    return {name for name in imports(ast.walk(tree_of(path))) if name.split(".")[0] in THIRD_PARTY}


def named(path: Path) -> set[str]:
    """The modules that strings name, as "module:Class" or by themselves; groups of entry points are none."""
    strings = {node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant)}
    found = set()
    for text in strings:
        if isinstance(text, str) and re.fullmatch(r"wlb_titan[.\w]+(:\w+)?", text):
            name, colon, _ = text.partition(":")
            file = ROOT / name.replace(".", "/")
            if colon or file.is_dir() or file.with_suffix(".py").exists():
                found.add(name)
    return found


def within(name: str, allowed: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in allowed)


def files_of(room: str) -> list[Path]:
    folder = ROOT / (room if room in ("kernels", "launch") else f"wlb_titan/{room}")
    return list(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@pytest.mark.parametrize("room", [*ROOMS, "kernels"])
def test_rooms_know_only_what_they_may(room):
    below = takewhile(lambda name: name != room, ROOMS) if room in ROOMS else ()
    ours = {f"wlb_titan.{name}" for name in (*below, room)} | {"wlb_titan.__version__"}
    allowed = ours | MAY_USE.get(room, {"numpy"})
    for file in files_of(room):
        for names, may in ((known(file), allowed), (named(file), allowed | {MAY_NAME.get(room, "")})):
            strangers = {name for name in names if not within(name, may)}
            assert not strangers, f"{file.relative_to(ROOT)} imports or names {sorted(strangers)}"


FILES, LONGEST = 195, 350  # of the package
TESTS = 23_297  # lines

LONGER = {
    "kernels/gluon_backward.py": 399,
    "wlb_titan/prepare/chat.py": 357,
    "wlb_titan/runtime/trainer.py": 356,
}


def lines(files: Iterable[Path]) -> dict[str, int]:
    return {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in files}


def test_the_house_does_not_grow():
    held = ROOMS | OTHERS
    found = {room: lines(files_of(room)) for room in held}
    grown = {room: sum(sizes.values()) - held[room] for room, sizes in found.items()}
    assert max(grown.values()) <= 0, {room: number for room, number in grown.items() if number > 0}
    sizes = dict(chain.from_iterable(sizes.items() for sizes in found.values()))
    assert len(sizes) <= FILES and sum(lines((ROOT / "tests").rglob("*.py")).values()) <= TESTS
    long = {name: number for name, number in sizes.items() if number > LONGER.get(name, LONGEST)}
    assert not long, f"cut by their ideas: {long}"


def test_every_room_is_listed():
    there = {path.stem for path in (ROOT / "wlb_titan").iterdir() if not path.name.startswith("__")}
    assert there == set(ROOMS)


def test_the_package_itself_imports_the_planner_for_others_alone():
    names = known(ROOT / "wlb_titan" / "__init__.py")
    assert {name.split(".")[1] for name in names} == {"balancing", "sampler"}


def test_every_package_is_installed():
    """setuptools takes the packages from a list; one that is missing there is missing in a wheel."""
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {file.parent for file in (ROOT / "wlb_titan").rglob("__init__.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(project["packages"]) == names | {
        f"wlb_titan.{name}" for name in ("kernels", "launch", "train_configs")
    }


def test_every_dependency_is_declared():
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in lines} | {"wlb_titan"}
    distributions = {"flash_attn": ["flash-attn-4"]} | packages_distributions()  # which is not installed
    for room in ("wlb_titan", "kernels", "launch"):
        for file in (ROOT / room).rglob("*.py"):
            names = {name.split(".")[0] for name in imports(ast.walk(tree_of(file)))}
            for name in names - set(sys.stdlib_module_names):
                found = {one.replace("-", "_").lower() for one in distributions[name]}
                assert declared & found, f"{file.relative_to(ROOT)} imports {name}"


def test_no_module_imports_itself_by_way_of_others():
    """By annotations neither."""
    files = [
        path.with_suffix("") for path in (ROOT / "wlb_titan").rglob("*.py") if path.name != "__init__.py"
    ]
    modules = {".".join(path.relative_to(ROOT).parts): path.with_suffix(".py") for path in files}
    imported = {}
    for name, path in modules.items():
        names = imports(ast.walk(tree_of(path)))
        imported[name] = (names | {name.rpartition(".")[0] for name in names}) & modules.keys()
    while leaves := [name for name, others in imported.items() if not others & imported.keys()]:
        for name in leaves:
            del imported[name]
    # What is left imports each other, or something that does.
    assert not imported, f"in circles: {sorted(imported)}"


def test_every_benchmark_is_listed():
    page = (ROOT / "benchmarks" / "README.md").read_text()
    programs = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert {name for name in programs if f"`{name}`" not in page} == set()
    assert set(re.findall(r"^\| `(\w+\.py)`", page, re.MULTILINE)) <= programs
