"""Writes settings.md, the reference of [wlb], beside this file: `python docs/settings.py`."""

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from wlb_titan.config.reference import settings_of
from wlb_titan.config.settings import WlbSettings
from wlb_titan.cost.workload import COST_MODELS
from wlb_titan.job import Policy
from wlb_titan.plugins import Family, PluginConfig
from wlb_titan.toml.values import dataclass_arms

PAGE = Path(__file__).with_suffix(".md")
HEAD = """\
# Settings

Every key of `[wlb]`, as the code has it; `python docs/settings.py` writes this page. `wlb-titan config show
FILE --explain` prints the same beside the values of a file, torchtitan's own included. How files,
bases and the command line go together is in [configuration.md](configuration.md).
"""
Row = tuple[str, str, str, str]  # key, type and range, default, meaning
POLICY = ("policy", "string", '"plain/per_sequence/as_packed"', inspect.cleandoc(Policy.__doc__))
NAME = ("name", "string", "", 'The dimension: "package.module:Class", or the short name of an installed one.')


def page() -> str:
    """The page, with the classes that come with wlb_titan."""
    sections = list(walk(WlbSettings, "wlb", "[{}]", [POLICY]))
    sections.append(table('wlb.packing.cost_model = "NAME:VALUE,VALUE"', of_family(COST_MODELS)))
    return "\n".join([HEAD, *sections])


def walk(cls: Any, name: str, header: str, first: Sequence[Row] = ()) -> Iterator[str]:
    chosen = issubclass(cls, PluginConfig) and not first
    yield table(header.format(name), of_family(cls.family) if chosen else [*first, *rows(cls)])
    for key, hint in get_type_hints(cls, include_extras=True).items():
        for section in dataclass_arms(hint):
            yield from walk(section, f"{name}.{key}", "[{}]")
        for section in dataclass_arms(get_args(hint)[0]) if get_origin(hint) is list else ():
            yield from walk(section, f"{name}.{key}", "[[{}]]", [NAME] * issubclass(section, PluginConfig))


def rows(cls: Any) -> list[Row]:
    return [(key, *said) for key, said in settings_of(cls).items()]


def of_family(family: Family) -> list[Row]:
    """The settings of a family's classes, each after the names of those that have it, unless all do."""
    having: dict[Row, list[str]] = {}
    for name in family.shipped:
        for setting in rows(family.find(name).Config):
            having.setdefault(setting, []).append(f"`{name}`")
    return [
        (*row, words if len(names) == len(family.shipped) else f"{', '.join(names)}: {words}")
        for (*row, words), names in having.items()
    ]


def table(title: str, settings: Sequence[Row]) -> str:
    if not settings:
        return f"## {title}\n\nThe classes that come with wlb_titan have no keys.\n"
    text = f"## {title}\n\n| key | type and range | default | meaning |\n| --- | --- | --- | --- |\n"
    for key, kind, default, words in settings:
        meaning = " ".join(words.split()).replace("<", "&lt;")
        text += f"| `{key}` | {kind} | {default and f'`{default}`'} | {meaning} |\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
