"""Dataclasses by name: what `class = "..."` in a TOML section may say.

torchtitan nests each component's dataclass in the component (`FullAC.Config` in `FullAC`), so the component's
name stands for it: `class = "torchtitan.distributed.activation_checkpoint:FullAC"`. Without a module,
`class = "FullAC"` means the class of that name among the loaded subclasses of what the section holds.
"""

from __future__ import annotations

import difflib
from dataclasses import is_dataclass

from wlb_titan.plugins import load


def short_name(cls: type) -> str:
    """`FullAC` for the class `FullAC.Config`."""
    return cls.__qualname__.removesuffix(".Config")


def full_name(cls: type) -> str:
    """`torchtitan.distributed.activation_checkpoint:FullAC` for that module's `FullAC.Config`."""
    return f"{cls.__module__}:{short_name(cls)}"


def importable(cls: type) -> bool:
    """Whether a class's full name leads back to it, as it does not for a class inside a function."""
    try:
        return _configuration(load(full_name(cls)), (cls,)) is cls
    except (ImportError, AttributeError):
        return False


def find_class(name: str, allowed: tuple[type, ...]) -> type:
    """The subclass of one of `allowed` that a name in a TOML file means; LookupError, with a message for the
    user, if there is none."""
    if ":" not in name:
        return _find_loaded(name, allowed)
    try:
        cls = _configuration(load(name), allowed)
    except (ImportError, ValueError, TypeError) as error:  # the latter two for "" and ".relative"
        raise LookupError(f"module {name.partition(':')[0]!r} cannot be imported ({error})") from error
    except AttributeError:
        cls = None
    if cls is None:
        kinds = " or ".join(full_name(kind) for kind in allowed)
        raise LookupError(f"{name!r} is no configuration of the kind {kinds}")
    return cls


def _configuration(found: object, allowed: tuple[type, ...]) -> type | None:
    """A dataclass, or the `Config` of a class that has one."""
    for candidate in (found, getattr(found, "Config", None)):
        if isinstance(candidate, type) and is_dataclass(candidate) and issubclass(candidate, allowed):
            return candidate
    return None


def _find_loaded(name: str, allowed: tuple[type, ...]) -> type:
    known = [cls for cls in _with_subclasses(allowed) if importable(cls)]
    matches = [cls for cls in known if short_name(cls) == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        options = " or ".join(f'"{full_name(cls)}"' for cls in matches)
        raise LookupError(f"several classes have this name; write {options}")
    names = sorted({short_name(cls) for cls in known})
    close = difflib.get_close_matches(name, names, n=1)
    hint = f", did you mean {close[0]!r}?" if close else "."
    raise LookupError(
        f"there is no such class here{hint} The loaded ones are {', '.join(names)}; "
        'any other is written "package.module:Class"'
    )


def _with_subclasses(roots: tuple[type, ...]) -> list[type]:
    found: dict[type, None] = {}  # a dict, for its order
    for root in roots:
        found[root] = None
        found.update(dict.fromkeys(_with_subclasses(tuple(root.__subclasses__()))))
    return list(found)
