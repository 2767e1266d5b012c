"""TOML over a base, with small dataclasses in the place of torchtitan's."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb_titan.config.load import Resolved, resolve
from wlb_titan.errors import ConfigError, UserError
from wlb_titan.toml import sources
from wlb_titan.toml.build import dotted
from wlb_titan.toml.sources import leaves, read_sources


class Circle:
    @dataclass(kw_only=True, slots=True)
    class Config:
        radius: float = 1.0

        def __post_init__(self):
            if self.radius <= 0:
                raise ValueError("that is not\n positive.")


class Disc(Circle):
    @dataclass(kw_only=True, slots=True)
    class Config(Circle.Config):
        filled: bool = True


class Square:
    @dataclass(kw_only=True, slots=True)
    class Config:
        side: float
        corner: Circle.Config = field(default_factory=Circle.Config)


@dataclass(slots=True)
class Group:
    pattern: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Training:
    steps: int = 10
    batch: int = 8
    microbatch: int = 2
    rate: float | int = 1.0
    note: str | None = None
    mode: Literal["fast", "slow"] = "fast"
    parts: list[list[str]] | None = None
    callback: Callable[[], int] | None = None

    def __post_init__(self):
        if self.batch % self.microbatch != 0:
            raise ValueError(f"the microbatch {self.microbatch} does not divide {self.batch}.")


@dataclass(kw_only=True, slots=True)
class Config:
    folder: str = "out"
    model_spec: object = None
    training: Training = field(default_factory=Training)
    shape: Circle.Config | Square.Config | None = field(default_factory=Circle.Config)
    inner: Circle.Config = field(default_factory=Disc.Config)
    extra: Square.Config | None = None
    limit: float = 40.0
    options: dict[str, int] | None = None
    anything: Any = None
    groups: list[Group] = field(default_factory=lambda: [Group(".*", {"lr": 1.0, "b": (1, 2)})])

    def __post_init__(self):
        if isinstance(self.shape, Circle.Config) and self.shape.radius + self.inner.radius > self.limit:
            raise ValueError("the sum of each radius is above the limit.")


def make_base(name: str) -> Config:
    if name != "small":
        raise UserError("there is only the base 'small'.")
    return Config(model_spec=print, training=Training(callback=len))


def values_of(resolved: Resolved) -> dict[str, Any]:
    return {dotted(entry.path): entry.value for entry in resolved.entries}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Write the given files and load "train.toml" with command-line words; one class has no name."""
    monkeypatch.chdir(tmp_path)

    @dataclass(kw_only=True, slots=True)
    class Hidden(Circle.Config):
        pass

    def load(*words: str, **files: str):
        for name, content in files.items():
            (tmp_path / f"{name}.toml").write_text(content)
        return resolve("train.toml", words, make_base)

    return load


# What parent.toml, train.toml and the command line say, between bars, and indented what comes of it.
RESOLVED = """
# The command line goes over the file over its parent over the base.
folder = "a"; [training]; steps = 1; rate = 3 | [training]; steps = 2; batch = 32 | --training.steps=3
    folder = 'a' (parent.toml:2); training.rate = 3 (parent.toml:5); training.batch = 32 (train.toml:4)
    training.steps = 3 (command line); training.microbatch = 2 (base small)
# The last word counts; a dataclass may accept values only together.
| training.batch = 9; training.microbatch = 3 | --training.steps=3 --training.steps 4
    training.batch = 9 (train.toml:2); training.microbatch = 3 (train.toml:3)
    training.steps = 4 (command line)
# Another class starts from its own defaults; the class that is there keeps its values.
| shape = {class = "NAME:Square.Config", side = 2} |
    shape.side = 2.0 (train.toml:2); shape.corner.radius = 1.0 (default of Square)
[inner]; radius = 3 | [inner]; class = "Disc" |
    inner.radius = 3.0 (parent.toml:3); inner.filled = True (base small)
# Another class drops what weaker layers set, in whichever order words are.
[shape]; radius = 3 | | --shape.side=5 --shape.class=Square
    shape.side = 5.0 (command line); no shape.radius
# A wrong value that a stronger layer replaces is not looked at.
training.steps = 0; [shape]; side = 3 | shape.class = "Disc" | --training.steps=3
    training.steps = 3 (command line); shape.filled = True (default of Disc)
# None over a table, and a table over none; a section that is none by default; an empty list.
[shape]; radius = 3 | | --shape=none
    shape = None (command line)
| shape = "none" | --shape.radius=2
    shape.radius = 2.0 (command line)
| [extra]; side = 1 |
    extra.side = 1.0 (train.toml:3)
| groups = [] |
    groups = [] (train.toml:2)
# Dicts gain keys, also where anything may stand.
options = {a = 1} | | --options.b=2
    options.a = 1 (parent.toml:2); options.b = 2 (command line)
| anything.x.z = [{a = 1}] | --anything.x.y=2
    anything.x.z = [{'a': 1}] (train.toml:2); anything.x.y = 2 (command line)
# An element by its number keeps the rest; a whole new list does not.
| groups.0.options.lr = 2 | --groups.0.options.b=[3,4]
    groups.0.pattern = '.*' (base small); groups.0.options.lr = 2 (train.toml:2)
    groups.0.options.b = (3, 4) (command line)
| [[groups]]; pattern = "a"; [[groups]]; pattern = "b" | --groups.1.options.lr=7
    groups.0.pattern = 'a' (train.toml:3); groups.1.options.lr = 7 (command line); no groups.0.options.lr
"""


def cases(text):
    """What is written in a table as above -> what is indented below it."""
    found = re.findall(r"^([^#\s].*)\n((?:    .*\n)+)", text, re.MULTILINE)
    return [pytest.param(*case, id=case[0]) for case in found]


def resolved_as(load, written):
    parent, train, words = written.replace("NAME", __name__).split("|")
    parent, train = (text.strip().replace("; ", "\n") for text in (parent, train))
    return load(*words.split(), parent=f'base = "small"\n{parent}', train=f'extends = "parent.toml"\n{train}')


@pytest.mark.parametrize(("written", "expected"), cases(RESOLVED))
def test_what_is_written_goes_over_the_base(load, written, expected):
    resolved = resolved_as(load, written)
    values = values_of(resolved)
    said = {f"{key} = {value!r} ({resolved.provenance[key]})" for key, value in values.items()}
    for one in re.split(r"; |\n *", expected.strip()):
        if one.startswith("no "):
            assert one.removeprefix("no ") not in values
        else:
            assert one in said, said


# Each key has its line, whatever stands in strings and comments.
PLACES = r'''# [ it's a comment
a."[=2" = """
[ ' \"""
"""
[[t]] # ]
x6 = [ # [
  {x6 = "]"},
]
[t.u]
y10 = '["'
[[t]]
u.z12 = 1
[b]
'''


def test_values_have_the_place_of_their_first_line_and_no_line_is_parsed_often(tmp_path, monkeypatch):
    parsed, loads = [], tomli.loads
    monkeypatch.setattr(tomli, "loads", lambda text: parsed.append(text) or loads(text))
    long = PLACES + "".join(f"k{line} = [\n1,\n]\n" for line in range(14, 1514, 3))
    (tmp_path / "a.toml").write_text(long)
    read = {path: leaf.source for path, leaf in leaves(read_sources(tmp_path / "a.toml"))}
    assert len(read) == 504
    for path, source in read.items():
        assert source == f"{tmp_path}/a.toml:{re.search(r'[0-9]+$', path[-1])[0]}"
    assert sum(map(len, parsed)) < 2.1 * len(long)


def test_a_file_that_many_extend_is_read_once(load, tmp_path, monkeypatch):
    """Each of 20 files extends the next one and the one after, so there are 10,946 ways to the last."""
    for number in range(20):
        after = [f"{place}.toml" for place in (number + 2, number + 1) if place < 20]
        (tmp_path / f"{number}.toml").write_text(f"extends = {after}\ntraining.steps = {20 - number}\n")
    read, regular_file = [], sources.regular_file
    monkeypatch.setattr(sources, "regular_file", lambda path: read.append(path) or regular_file(path))
    resolved = load(train='base = "small"\nextends = "0.toml"')
    assert (len(read), resolved.config.training.steps) == (21, 20)


def test_the_strongest_base_wins_and_extends_is_relative_to_its_file(load, tmp_path):
    (tmp_path / "deep").mkdir()
    deep = 'base = "nonsense"\nextends = "../b.toml"\ntraining.steps = 5\n'
    (tmp_path / "deep" / "a.toml").write_text(deep)
    resolved = load(b='folder = "b"', train='base = "small"\nextends = "deep/a.toml"')
    assert (resolved.config.folder, resolved.config.training.steps) == ("b", 5)
    assert resolved.base.source == "train.toml:1"
    with pytest.raises(ConfigError, match='command line: base = "other": there is only'):
        load("--base", "other", train='base = "small"')


@pytest.mark.parametrize(
    "word, key, value",
    [
        ("--folder=5", "folder", "5"),
        ("--folder=true", "folder", "true"),
        ("--folder=a = b # c", "folder", "a = b # c"),
        ('--folder="quoted"', "folder", "quoted"),
        ("--folder=", "folder", ""),
        ("--folder=2024-01-01", "folder", "2024-01-01"),
        ("--training.rate=-2", "training.rate", -2),
        ("--training.note=none", "training.note", None),
        ("--training.mode=slow", "training.mode", "slow"),
        ('--training.parts=[["x"]]', "training.parts", [["x"]]),
        ("--shape={radius = 4}", "shape.radius", 4.0),
    ],
)
def test_command_line_values_take_the_type_of_their_field(load, word, key, value):
    for words in ([word], word.split("=", 1)):
        resolved = load(*words, train='base = "small"')
        found = values_of(resolved)[key]
        assert found == value and type(found) is type(value)
        assert resolved.provenance[key] == "command line"


# What is written as in RESOLVED, and indented the whole message.
REFUSED = """
| [training]; microbatch = 5; steps = 3 |
    train.toml:3: training.microbatch = 5: Training rejects this: the microbatch 5 does not divide 8.
[inner]; radius = -1 | | --inner.filled false
    command line: [inner]: Disc rejects this: that is not positive. You set inner.radius = -1
    (parent.toml:3), inner.filled = false (command line).
shape.radius = -1 | |
    parent.toml:2: shape.radius = -1: Circle rejects this: that is not positive.
inner.radius = 20 | | --shape.radius=21 --folder=x
    command line: Config rejects this: the sum of each radius is above the limit. You set
    inner.radius = 20 (parent.toml:2), shape.radius = 21 (command line).
| shape.class = "Hidden" |
    train.toml:2: shape.class = "Hidden": there is no such class here. The loaded ones are Circle,
    Disc, Square; any other is written "package.module:Class".
| shape.class = ".x:Circle" |
    train.toml:2: shape.class = ".x:Circle": '.x:Circle' cannot be imported: the 'package' argument
    is required to perform a relative import for '.x'.
| [extra] |
    train.toml:2: [extra]: the required key 'side' is missing.
| [[options]]; a = 1 |
    train.toml:2: options = [{a = 1}]: should be a table or be "none".
training.steps = 0 | |
    parent.toml:2: training.steps = 0: should be greater than or equal to 1.
| limit = nan |
    train.toml:2: limit = nan: strings may not contain zero bytes, numbers should be finite and have at
    most 64 bits, and dates are not supported.
groups = 3 | |
    parent.toml:2: groups = 3: should be a valid array.
extends = "train.toml" | |
    parent.toml:2: extends = "train.toml": the files extend each other in a circle:
    train.toml -> parent.toml -> train.toml.
extends = "nowhere.toml" | |
    parent.toml:2: extends = "nowhere.toml": the file nowhere.toml cannot be read: No such file or directory.
"""


@pytest.mark.parametrize(("written", "message"), cases(REFUSED))
def test_what_is_wrong_is_told_with_its_place(load, written, message):
    with pytest.raises(ConfigError) as caught:
        resolved_as(load, written)
    assert str(caught.value) == " ".join(message.split())


def test_a_file_without_a_base_or_that_is_no_toml_is_refused(load):
    with pytest.raises(ConfigError, match=r"^train\.toml: no base is named; write for example base = "):
        load(train="training.steps = 3")
    with pytest.raises(ConfigError, match=r"^train\.toml:2: this is not valid TOML:"):
        load(train='base = "small"\n' + "[training\nsteps = 3")


def test_a_rule_over_the_whole_names_the_place(load):
    resolved = load(train='base = "small"\n[training]\nsteps = 3\nbatch = 4')

    def rule(message: str):
        def check(config):
            raise UserError(message)

        with pytest.raises(ConfigError) as caught:
            resolved.check(check)
        return str(caught.value)

    assert rule("training.steps: too few") == "train.toml:3: training.steps = 3: too few"
    assert rule("training.rate: no") == "train.toml:1: training.rate = 1.0 (base small): no"
    both = "You set training.steps = 3 (train.toml:3), training.batch = 4 (train.toml:4)."
    assert rule("training: odd.") == f"train.toml:1: training: odd. {both}"


def test_without_settings_the_base_comes_out_with_what_toml_cannot_express(load):
    resolved = load(train='base = "small"')
    assert resolved.config == make_base("small")
    assert set(resolved.provenance.values()) == {"base small"}
    written = resolved.to_toml()
    assert "# callback: a Python builtin_function_or_method, which only the base can give" in written
    assert load(train=written).config == resolved.config


# Random settings for each key, spread over a parent file, the file and the command line.
NUMBERS = st.floats(0.5, 20) | st.integers(1, 20)
INTEGERS = st.integers(1, 2**63 - 1)
OPTIONS = st.booleans() | INTEGERS | st.text("ab \"'\\#=\n", max_size=5) | st.lists(INTEGERS, max_size=2)
KEYS: dict[str, st.SearchStrategy[Any]] = {
    "folder": st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    "training.steps": INTEGERS,
    "training.rate": NUMBERS,
    "training.note": st.text("none5", max_size=4),
    "training.mode": st.sampled_from(["fast", "slow"]),
    "training.parts": st.lists(st.lists(st.text("ab", max_size=2), max_size=2), max_size=2) | st.just("none"),
    "shape.class": st.sampled_from(["Circle", "Disc", f"{__name__}:Disc"]),
    "shape.radius": NUMBERS,
    "inner.class": st.sampled_from(["Circle", "Disc"]),
    "inner.radius": NUMBERS,
    "extra.side": NUMBERS,
    "options.a": INTEGERS,
    "anything.x.y": OPTIONS,
    "groups.0.pattern": st.text("abc.*", max_size=4),
    "groups.0.options.lr": NUMBERS,
    "groups.0.options.b": st.lists(INTEGERS, max_size=2),
    "groups.0.options.new": OPTIONS,
}
LAYER = st.fixed_dictionaries({}, optional=KEYS)


def toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_file(layer: dict[str, Any], head: str) -> str:
    return "\n".join([head, *(f"{key} = {toml(value)}" for key, value in layer.items())])


@settings(max_examples=150)
@given(parent=LAYER, child=LAYER, words=LAYER, replaced=st.booleans())
@pytest.mark.long
def test_the_resolved_toml_loads_to_an_equal_configuration(tmp_path_factory, parent, child, words, replaced):
    folder = tmp_path_factory.getbasetemp()
    new_list = "\n[[groups]]\npattern = 'x'\noptions.b = [1]\n[[groups]]\npattern = 'y'\n" if replaced else ""
    if replaced:
        parent = {key: value for key, value in parent.items() if not key.startswith("groups")}
    (folder / "parent.toml").write_text(toml_file(parent, 'base = "small"') + new_list)
    (folder / "child.toml").write_text(toml_file(child, 'extends = "parent.toml"'))
    base, command_line = make_base("small"), [f"--{key}={toml(value)}" for key, value in words.items()]
    resolved = resolve(folder / "child.toml", command_line, lambda name: base)
    assert base == make_base("small"), "the base was changed"

    (folder / "saved.toml").write_text(resolved.to_toml())
    again = resolve(folder / "saved.toml", [], make_base)
    assert again.config == resolved.config
    assert list(again.provenance) == list(resolved.provenance), "a key was lost or came up"
    (folder / "changes.toml").write_text(resolved.to_toml(changed_only=True))
    assert resolve(folder / "changes.toml", [], make_base).config == resolved.config
