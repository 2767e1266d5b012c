"""The calls of kernels/fa4.py by the real package's signatures, read from its source, as importing
it needs a compiler for GPUs; and its number of
many sequences."""

import ast
import inspect
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_fa4
from oracle import CASES
from wlb_titan.kernels import fa4

(FOLDER,) = find_spec("flash_attn").submodule_search_locations
SOURCE = ast.parse((Path(FOLDER) / "cute" / "interface.py").read_text())


def signature(name):
    """Of a function of the package, its defaults as they are written."""
    (function,) = (x for x in SOURCE.body if isinstance(x, ast.FunctionDef) and x.name == name)
    bare = ast.Lambda(args=function.args, body=ast.Constant(None))
    for argument in function.args.args + function.args.kwonlyargs:
        argument.annotation = None
    return inspect.signature(eval(ast.unparse(bare)))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dlse", [True, False])
def test_the_real_functions_take_what_they_are_given(monkeypatch, window, dlse):
    def bound(name, computed):
        def call(*positional, **named):
            return computed(**signature(name).bind(*positional, **named).arguments)

        return call

    ours = {"_flash_attn_fwd": test_fa4.forward, "_flash_attn_bwd": test_fa4.backward}
    module = SimpleNamespace(**{name: bound(name, computed) for name, computed in ours.items()})
    monkeypatch.setitem(sys.modules, test_fa4.PACKAGE, module)
    segments, *tokens = CASES["shard"]
    test_fa4.check(segments, tokens, (4, 2), window, dlse=dlse)


def test_empty_sequences_make_what_it_takes_for_many():
    (found,) = (
        node.value.value
        for node in SOURCE.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BIN_BATCH_SEARCH_THRESH"
    )
    assert found < fa4.MANY
