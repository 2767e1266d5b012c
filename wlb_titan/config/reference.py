"""What settings mean: type, range, default, and the words under the fields of their dataclasses."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from annotated_types import MinLen

from wlb_titan.job import Policy
from wlb_titan.toml.build import default_of
from wlb_titan.toml.values import allows_none, arms, dataclass_arms, expressed, in_words, limits_of

TYPES = {int: "integer", float: "number", str: "string", bool: "true or false", NoneType: '"none"'}


@cache
def settings_of(cls: Any) -> dict[str, tuple[str, str, str]]:
    """Of a dataclass' fields by name, without sections: type and range, default as TOML, meaning."""
    said, settings = {}, {}
    for base in filter(inspect.get_annotations, reversed(cls.__mro__)):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for field, text in pairwise(getattr(body, "body", ())):
            match field, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                    said[name] = " ".join(words.split())
    hints = get_type_hints(cls, include_extras=True)
    for name, default in ((field.name, default_of(field)) for field in fields(cls)):
        if not dataclass_arms(hint := hints[name]):
            as_toml = "" if default is MISSING else expressed(default, hint) or ""
            settings[name] = in_kind(hint), as_toml, said.get(name, "")
    return settings


def in_kind(hint: Any) -> str:
    """A type hint in words: `list of integers, at least 2`."""
    inner = get_args(hint)
    if get_origin(hint) is Annotated:
        rules = ["not empty" if isinstance(rule, MinLen) else in_words(limits_of(rule)) for rule in inner[1:]]
        return ", ".join([in_kind(inner[0]), *filter(None, rules)])
    if get_origin(hint) is Literal:
        return " or ".join(f'"{option}"' for option in inner)
    if get_origin(hint) is list:
        kind, *limits = in_kind(inner[0]).split(",")
        return ",".join([f"list of {kind}s", *limits])
    if hint not in TYPES and len(options := [*arms(hint), *[NoneType] * allows_none(hint)]) > 1:
        return " or ".join(map(in_kind, options))
    return TYPES.get(hint) or ("table" if is_dataclass(hint) else str(getattr(hint, "__name__", hint)))


def meaning_of(config: Any, path: Sequence[str | int]) -> str:
    """What a configuration's setting at a path of keys means; empty where nothing says it."""
    if path == ("wlb", "policy"):  # which stands for three sections
        return inspect.cleandoc(str(Policy.__doc__))
    for key in path[:-1]:
        if isinstance(config, list | tuple):
            config = config[int(key)]
        else:
            config = config[key] if isinstance(config, dict) else getattr(config, str(key))
    cls: Any = type(config)
    settings = settings_of(cls) if is_dataclass(config) else {}
    kind, default, words = settings.get(str(path[-1]), ("", "", ""))
    return f"{words} ({kind}; default {default or 'none'})" if kind else ""
