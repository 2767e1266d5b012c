"""Classes that a user chooses by name: the ones that come with wlb_titan, and anybody's own.

A plug-in is a class with a dataclass `Config` inside it, the settings of its TOML section. One key of the
section names the class, as "package.module:Class" or by a short name (`policy = "wlb_lazy"`); installed
packages add short names by entry points. The other keys are the fields of the Config.

    class WlbLazy(PackingPolicy):
        @dataclass(kw_only=True, slots=True)
        class Config(PackingPolicy.Config):
            max_delay: int = 16

    POLICIES.find("wlb_lazy") is WlbLazy
    POLICIES.configure("wlb_lazy", max_delay=20).make(stream, job)

torchtitan nests each component's dataclass in the component too (`FullAC.Config` in `FullAC`), so that the
component's name stands for it: `class = "torchtitan.distributed.activation_checkpoint:FullAC"`. Without a
module, `class = "FullAC"` means the class of that name among the loaded subclasses of what the section holds.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points, packages_distributions, version
from typing import Any, ClassVar, Self

from wlb_titan.errors import UserError


class Plugin:
    """The base of every family of plug-ins; a subclass without a `Config` gets one like its parent's."""

    Config: ClassVar[type]
    automatic: ClassVar[bool] = False
    """Before anything is planned, the candidate of its family that is predicted fastest takes its place."""
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
    """The base of every family's `Config`: the settings of one class, the `owner`."""

    family: ClassVar[Family]
    owner: ClassVar[type[Any]]

    @property
    def name(self) -> str:
        return self.owner_name()

    @classmethod
    def owner_name(cls) -> str:
        """Its short name, or else "module:Class"."""
        target = f"{cls.owner.__module__}:{cls.owner.__qualname__}"
        return next((name for name, path in cls.family.targets.items() if path == target), target)

    def make(self, *arguments: Any, **keywords: Any) -> Any:
        return self.owner(self, *arguments, **keywords)

    def named(self, name: str) -> Self:
        """The settings of another class of the family, with the values that both have."""
        if name == self.name:
            return self
        config: type[Self] = self.family.find(name).Config
        return config(**{key: getattr(self, key) for key in _keys(config) & _keys(self)})


def _keys(config: Any) -> set[str]:
    return {field.name for field in fields(config)}


@dataclass(frozen=True)
class Family:
    kind: str  # what messages call one of the classes
    key: str  # of the TOML section
    group: str  # of the entry points
    base: str  # "module:Class" of which all are subclasses
    shipped: Mapping[str, str]  # short name -> "module:Class"

    @property
    def names(self) -> tuple[str, ...]:
        """Short names, the shipped ones first."""
        return tuple(self.targets)

    @property
    def candidates(self) -> list[str]:
        """Short names of the classes that `auto` chooses from."""
        classes = self._classes.items()
        return [name for name, cls in classes if cls.candidate and not cls.automatic]

    @property
    def _classes(self) -> dict[str, type[Any]]:
        """By short name, without those of other packages that do not fit, which are warned of."""
        classes = {}
        for name in self.names:
            try:
                classes[name] = self.find(name)
            except UserError as error:
                warnings.warn(f"{self.kind} {name!r} is left out: {error}", stacklevel=2)
        return classes

    @property
    def targets(self) -> dict[str, str]:
        """Short name -> "module:Class"; packages cannot replace shipped names."""
        installed = {point.name: point.value for point in _installed(self.group)}
        return {**self.shipped, **installed, **self.shipped}

    def find(self, name: str) -> type[Any]:
        """The class of a name; a UserError if there is none."""
        target = self.targets.get(name, name)
        if ":" not in target:
            near = difflib.get_close_matches(name, self.names, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(
                f"no {self.kind} is called {name!r}.{hint} There are {', '.join(self.names)}, and any "
                'installed one as "package.module:Class"'
            )
        loaded = load(target)
        if not (isinstance(loaded, type) and issubclass(loaded, load(self.base))):
            raise UserError(f"{target} is not a {self.kind}: it does not derive from {self.base}")
        for cls in (loaded, vars(loaded)["Config"]):
            check_interface(cls)
        return loaded

    def configure(self, name: str, **settings: Any) -> Any:
        return self.find(name).Config(**settings)

    def having(self, key: str) -> list[str]:
        return [name for name, cls in self._classes.items() if key in _keys(cls.Config)]


def is_ours(cls: type) -> bool:
    """Whether a class comes with wlb_titan."""
    return cls.__module__.partition(".")[0] == "wlb_titan"


@cache
def check_interface(cls: type, *bases: type) -> None:
    """Refuses a class of others that does not fit what wlb_titan's classes leave to it, such as one that was
    written for an earlier version. `bases` are those from which it need not derive."""
    interface: dict[str, Any] = {}
    for base in filter(is_ours, reversed((*cls.__mro__, *bases)) if not is_ours(cls) else ()):
        hints = inspect.get_annotations(base).items()
        interface |= {name: None for name, hint in hints if "ClassVar" in str(hint)} | dict(vars(base))
    missing, problems = [], []
    for name, wanted in interface.items():
        if name.startswith("_") and (is_dataclass(cls) or name not in ("__init__", "__call__")):
            continue
        given = inspect.getattr_static(cls, name, None)
        if given is None or getattr(given, "__isabstractmethod__", False):
            missing.append(name)
        elif wanted is not None and given is not wanted and not _takes(given, wanted):
            problems.append(f"{name}{_signature(given) or ''} is called as {name}{_signature(wanted) or ''}")
    problems += [f"it lacks {', '.join(missing)}"] * bool(missing)
    if problems:
        packages = packages_distributions().get(cls.__module__.partition(".")[0], [])
        package = ", ".join(f"{name} {version(name)}" for name in packages) or "of no installed package"
        raise UserError(
            f"{cls.__module__}:{cls.__qualname__} ({package}) does not fit this wlb_titan: "
            f"{'; '.join(problems)}. docs/extending.md has the interfaces, CHANGELOG.md what has changed"
        )


def _signature(attribute: Any) -> inspect.Signature | None:
    """Of a method; None for a property, a value or a class."""
    function = getattr(attribute, "__func__", attribute)
    return inspect.signature(function) if inspect.isroutine(function) else None


def _takes(given: Any, wanted: Any) -> bool:
    """Whether the one method takes the calls of the other; of what is no method, neither is."""
    signature, calls = _signature(given), _signature(wanted)
    if signature is None or calls is None:
        return signature is calls
    kinds = [(parameter.kind, parameter.name) for parameter in calls.parameters.values()]
    named = {name: None for kind, name in kinds if kind is inspect.Parameter.KEYWORD_ONLY}
    positional = [name for kind, name in kinds if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    # After `*meshes` it may want any number of them.
    open_ended = any(kind is inspect.Parameter.VAR_POSITIONAL for kind, _ in kinds)
    try:
        (signature.bind_partial if open_ended else signature.bind)(*positional, **named)
    except TypeError:
        return False
    return isinstance(given, classmethod) == isinstance(wanted, classmethod)


@cache
def _installed(group: str) -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=group)))  # hosts list them in different orders


def load(target: str) -> Any:
    """The object called "package.module:Name"."""
    module, _, qualified_name = target.partition(":")
    try:
        loaded: Any = importlib.import_module(module)
        for part in qualified_name.split("."):
            loaded = getattr(loaded, part)
    except (ImportError, AttributeError, ValueError, TypeError) as error:  # these two for "" and ".relative"
        yours = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        where = "; if it is in a folder of yours, start with PYTHONPATH=FOLDER" if yours else ""
        raise UserError(f"{target!r} cannot be imported: {error}{where}") from error
    return loaded


def short_name(config: type) -> str:
    """`FullAC` for the class `FullAC.Config`."""
    return config.__qualname__.removesuffix(".Config")


def full_name(config: type) -> str:
    """`torchtitan.distributed.activation_checkpoint:FullAC` for that module's `FullAC.Config`."""
    return f"{config.__module__}:{short_name(config)}"


def configuration(name: str, allowed: tuple[type, ...]) -> type:
    """The dataclass that a `class = "..."` means, a subclass of one of `allowed`."""
    if ":" not in name:
        name = _loaded_name(name, allowed)
    loaded = load(name)
    for candidate in (loaded, getattr(loaded, "Config", None)):
        if isinstance(candidate, type) and is_dataclass(candidate) and issubclass(candidate, allowed):
            return candidate
    kinds = " or ".join(full_name(kind) for kind in allowed)
    raise UserError(f"{name!r} is not a configuration of the kind {kinds}")


def _loaded_name(name: str, allowed: tuple[type, ...]) -> str:
    """The full name of the one loaded class of a short name."""
    classes = [*allowed]
    for config in classes:
        classes += config.__subclasses__()
    # dataclasses with slots are made twice, so names are compared; a class inside a function has none.
    names = sorted({full_name(config) for config in classes if "<locals>" not in config.__qualname__})
    matches = [full for full in names if full.partition(":")[2] == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"several classes have this name; write {' or '.join(map(repr, matches))}")
    short = sorted({full.partition(":")[2] for full in names})
    near = difflib.get_close_matches(name, short, n=1)
    raise UserError(
        f"there is no such class here{f', did you mean {near[0]!r}?' if near else '.'} The loaded ones are "
        f'{", ".join(short)}; any other is written "package.module:Class"'
    )
