"""The user's values that a dataclass objects to.

A `__post_init__` raises an error about a combination of values and does not know where they were written.
So values are taken away one after the other, the weakest layer's first, where the dataclass still objects
without them. The few that are left are to blame: without any one of them it would be content.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from wlb_titan.config.build import Builder, Rejection, dotted
from wlb_titan.config.sources import Table, leaves
from wlb_titan.config.values import shown
from wlb_titan.errors import ConfigError


def blame(rejection: Rejection, builder: Builder, layers: Sequence[Table]) -> ConfigError:
    """Turn the rejection of what `layers` say into an error that names the values to blame."""
    for path in dict.fromkeys(path for layer in layers for path, _ in leaves(layer)):
        fewer = [_without(layer, path) for layer in layers]
        if _rejected(rejection, builder, fewer):
            layers = fewer
    left = {path: leaf for layer in layers for path, leaf in leaves(layer)}
    first, *others = [
        f"{leaf.source}: {dotted(path)} = {shown(leaf.value)}" for path, leaf in reversed(left.items())
    ]
    also = f" It goes together with {'; '.join(others)}." if others else ""
    return ConfigError(f"{first}: {rejection.reason}{also}")


def _rejected(rejection: Rejection, builder: Builder, layers: Sequence[Table]) -> bool:
    """Whether what `layers` say is rejected at the same place."""
    try:
        builder.build(layers)
    except Rejection as other:
        return other.path == rejection.path
    except ConfigError:
        return False
    return False


def _without(table: Table, path: Sequence[str]) -> Table:
    """The table without the value at `path`."""
    key, *deeper = path
    children = dict(table.children)
    child = children.get(key)
    if isinstance(child, Table) and deeper:
        children[key] = _without(child, deeper)
    else:
        children.pop(key, None)
    return dataclasses.replace(table, children=children)
