"""Classes that a user chooses by name: the ones that come with wlb_titan, and anybody's own.

A plug-in is a class with the settings of its TOML section in a dataclass `Config` inside it. One key of the
section names the class: by a short name (`policy = "wlb_lazy"`), which an installed package may add to by an
entry point, or as "package.module:Class". The section's other keys are the fields of that class's Config.

    class Plain(PackingPolicy):
        @dataclass(kw_only=True, slots=True)
        class Config(PackingPolicy.Config):
            tail: Literal["carry", "drop"] = "carry"

    POLICIES.find("plain") is Plain
    POLICIES.configure("plain", tail="drop").make(stream, job)
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Self

from wlb_titan.errors import UserError


class Plugin:
    """The base of every family of plug-ins; a subclass has a `Config`, or gets one like its parent's."""

    Config: ClassVar[type]
    automatic: ClassVar[bool] = False
    """It stands for whichever candidate of its family is predicted fastest, which takes its place before
    anything is planned."""
    candidate: ClassVar[bool] = True

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "Config" not in cls.__dict__:
            namespace = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config"}
            config = type("Config", (cls.Config,), {**namespace, "__doc__": cls.Config.__doc__})
            cls.Config = dataclass(kw_only=True, slots=True)(config)
        cls.Config.owner = cls  # type: ignore[attr-defined]


@dataclass(kw_only=True, slots=True)
class PluginConfig:
    """The base of every family's `Config`: the settings of one class, their `owner`."""

    family: ClassVar[Family]
    owner: ClassVar[type[Any]]

    @property
    def name(self) -> str:
        """What the section's key says for this class."""
        return self.owner_name()

    @classmethod
    def owner_name(cls) -> str:
        return cls.family.name_of(cls.owner)

    def make(self, *arguments: Any, **keywords: Any) -> Any:
        """An instance of the class, with these settings."""
        return self.owner(self, *arguments, **keywords)

    def named(self, name: str) -> Self:
        """The settings of another class of the family, with the values that both have; itself for its own."""
        if name == self.name:
            return self
        config: type[Self] = self.family.find(name).Config
        return config(**{key: getattr(self, key) for key in _keys(config) & _keys(self)})


def _keys(config: Any) -> set[str]:
    return {field.name for field in fields(config)}


@dataclass(frozen=True)
class Family:
    """Classes of one kind."""

    kind: str  # what messages call one of them
    key: str  # key of the TOML section that chooses the class
    group: str  # group of the entry points that name further classes
    base: str  # "module:Class", from which all derive
    shipped: Mapping[str, str]  # short name -> "module:Class"

    @property
    def names(self) -> tuple[str, ...]:
        """All short names, the shipped ones first."""
        return tuple(self._targets)

    @property
    def candidates(self) -> list[str]:
        """Names of the classes that `auto` chooses from."""
        classes = {name: self.find(name) for name in self.names}
        return [name for name, one in classes.items() if one.candidate and not one.automatic]

    @property
    def _targets(self) -> dict[str, str]:
        """Short name -> "module:Class"; an installed package cannot take a shipped name."""
        installed = {point.name: point.value for point in _installed(self.group)}
        return {**self.shipped, **installed, **self.shipped}

    def find(self, name: str) -> type[Any]:
        """The class of a name; UserError where it leads nowhere."""
        target = self._targets.get(name, name)
        if ":" not in target:
            near = difflib.get_close_matches(name, self.names, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(
                f"no {self.kind} is called {name!r}.{hint} There are {', '.join(self.names)}, and any "
                'installed one as "package.module:Class"'
            )
        try:
            found = load(target)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"the {self.kind} {name!r} cannot be imported: {error}") from error
        if not (isinstance(found, type) and issubclass(found, load(self.base))):
            raise UserError(f"{target} is not a {self.kind}: it does not derive from {self.base}")
        return found

    def configure(self, name: str, **settings: Any) -> Any:
        """The settings of the class of that name, with these values and defaults for the others."""
        return self.find(name).Config(**settings)

    def having(self, key: str) -> list[str]:
        """Short names of the classes whose settings have a key."""
        return [name for name in self.names if key in _keys(self.find(name).Config)]

    def name_of(self, cls: type) -> str:
        """The name by which `find` gives a class."""
        target = f"{cls.__module__}:{cls.__qualname__}"
        return next((name for name, known in self._targets.items() if known == target), target)


@cache
def _installed(group: str) -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=group)))  # on each host they are listed in another order


def load(target: str) -> Any:
    """The object that "package.module:Name" names."""
    module, _, qualified_name = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualified_name.split("."):
        found = getattr(found, part)
    return found
