"""TOML over a base, with small dataclasses in the place of torchtitan's."""

import copy
import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb_titan.config import ConfigError
from wlb_titan.config.load import Resolved, resolve
from wlb_titan.errors import UserError


class Circle:
    @dataclass(kw_only=True, slots=True)
    class Config:
        radius: float = 1.0

        def __post_init__(self):
            if self.radius <= 0:
                raise ValueError("a radius is positive.")


class Disc(Circle):
    @dataclass(kw_only=True, slots=True)
    class Config(Circle.Config):
        filled: bool = True


class Square:
    @dataclass(kw_only=True, slots=True)
    class Config:
        side: float
        corner: Circle.Config = field(default_factory=Circle.Config)


@dataclass(kw_only=True, slots=True)
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
            raise ValueError(f"{self.batch} is not\n a multiple of {self.microbatch}.")


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
    groups: list[Group] = field(
        default_factory=lambda: [Group(pattern=".*", options={"lr": 1.0, "b": (1, 2)})]
    )

    def __post_init__(self):
        if isinstance(self.shape, Circle.Config) and self.shape.radius + self.inner.radius > self.limit:
            raise ValueError("the circles do not fit.")


def make_base(name: str) -> Config:
    if name != "small":
        raise UserError("there is only the base 'small'.")
    return Config(model_spec=print, training=Training(callback=len))


def values_of(resolved: Resolved) -> dict[str, Any]:
    return {".".join(map(str, entry.path)): entry.value for entry in resolved.entries}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Write the given files and load "train.toml" with command-line words."""
    monkeypatch.chdir(tmp_path)

    def load(*words: str, **files: str):
        for name, content in files.items():
            (tmp_path / f"{name}.toml").write_text(textwrap.dedent(content))
        return resolve("train.toml", words, make_base)

    return load


def test_without_settings_the_base_comes_out(load):
    resolved = load(train='base = "small"')
    assert resolved.config == make_base("small")
    assert set(resolved.provenance.values()) == {"base small"}


def test_order_and_provenance(load):
    resolved = load(
        "--training.steps=3",
        parent='base = "small"\nfolder = "a"\n[training]\nsteps = 1\nbatch = 16\nrate = 3\n',
        train='extends = "parent.toml"\n\n[training]\nsteps = 2\nbatch = 32\n',
    )
    training = resolved.config.training
    assert (resolved.config.folder, training.steps, training.batch, training.rate) == ("a", 3, 32, 3)
    origin = resolved.provenance
    assert origin["folder"] == "parent.toml:2"
    assert origin["training.rate"] == "parent.toml:6"
    assert origin["training.batch"] == "train.toml:5"
    assert origin["training.steps"] == "command line"
    assert origin["training.microbatch"] == "base small"


def test_the_strongest_base_wins_and_extends_is_relative_to_its_file(load, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.toml").write_text(
        'base = "nonsense"\nextends = "../b.toml"\ntraining.steps = 5\n'
    )
    resolved = load(b='folder = "b"', train='base = "small"\nextends = "deep/a.toml"')
    assert (resolved.config.folder, resolved.config.training.steps) == ("b", 5)
    assert resolved.base.source == "train.toml:1"
    with pytest.raises(ConfigError, match='command line: base = "other": there is only'):
        load("--base", "other", train='base = "small"')


def test_lines_of_values_that_span_several(load):
    resolved = load(
        train='''\
        base = "small"
        folder = """
        x = 1
        """  # a string that looks like TOML
        training.parts = [
            ["a", "b"],

            ["c"],
        ]
        training.steps = 4
        ''',
    )
    origin = resolved.provenance
    assert resolved.config.training.parts == [["a", "b"], ["c"]]
    assert origin["folder"] == "train.toml:2"
    assert origin["training.parts"] == "train.toml:5"
    assert origin["training.steps"] == "train.toml:10"


def test_another_class_starts_from_its_own_defaults(load):
    for name in ("Square", f"{__name__}:Square", f"{__name__}:Square.Config"):
        resolved = load(train=f'base = "small"\nshape = {{class = "{name}", side = 2}}')
        assert resolved.config.shape == Square.Config(side=2.0)
        assert resolved.provenance["shape.corner.radius"] == "default of Square"


def test_naming_the_class_that_is_there_keeps_its_values(load):
    resolved = load(
        parent='base = "small"\n[inner]\nradius = 3\n',
        train='extends = "parent.toml"\n[inner]\nclass = "Disc"\n',
    )
    assert resolved.config.inner == Disc.Config(radius=3.0)


def test_another_class_drops_the_keys_that_weaker_layers_set_for_the_old_one(load):
    resolved = load(
        "--shape.side=5",
        "--shape.class=Square",  # in whichever order
        parent='base = "small"\n[shape]\nradius = 3\n',
        train='extends = "parent.toml"',
    )
    assert resolved.config.shape == Square.Config(side=5.0)


def test_none_and_back(load):
    assert load(train='base = "small"\nshape = "none"').config.shape is None
    assert load("--shape=none", train='base = "small"').config.shape is None
    resolved = load("--shape.radius=2", train='base = "small"\nshape = "none"')
    assert resolved.config.shape == Circle.Config(radius=2.0)


def test_none_over_a_table(load):
    resolved = load("--shape=none", train='base = "small"\n[shape]\nradius = 3')
    assert resolved.config.shape is None
    assert resolved.provenance["shape"] == "command line"


def test_a_wrong_value_is_an_error_even_if_a_stronger_layer_replaces_it(load):
    for key in ("training", "shape", "groups", "options"):
        with pytest.raises(ConfigError, match=rf"parent.toml:2: {key} = 3: expected"):
            load(f"--{key}={{}}", parent=f'base = "small"\n{key} = 3', train='extends = "parent.toml"')


def test_dicts_gain_keys(load):
    assert load(train='base = "small"\n[options]').config.options == {}
    resolved = load(
        "--options.b=2", parent='base = "small"\noptions = {a = 1}', train='extends = "parent.toml"'
    )
    assert resolved.config.options == {"a": 1, "b": 2}
    with pytest.raises(ConfigError, match=r"train.toml:2: options = .*: expected a table or \"none\"."):
        load(train='base = "small"\n[[options]]\na = 1')


def test_a_table_where_anything_may_stand(load):
    resolved = load("--anything.x.y=2", train='base = "small"\nanything.x.z = [{a = 1}]')
    assert resolved.config.anything == {"x": {"z": [{"a": 1}], "y": 2}}


def test_only_classes_that_a_file_can_name_are_known_by_their_short_name(load):
    @dataclass(kw_only=True, slots=True)
    class Hidden(Circle.Config):
        pass

    with pytest.raises(
        ConfigError, match=r"no such class here\. The loaded ones are Circle, Disc, Square;"
    ) as caught:
        load(train='base = "small"\nshape.class = "Hidden"')
    assert "<locals>" not in str(caught.value)
    for name in (":Circle", ".x:Circle"):
        with pytest.raises(ConfigError, match="cannot be imported"):
            load(train=f'base = "small"\nshape.class = "{name}"')


def test_a_section_that_is_none_by_default(load):
    resolved = load(train='base = "small"\n[extra]\nside = 1')
    assert resolved.config.extra == Square.Config(side=1.0)
    with pytest.raises(ConfigError, match=r"train.toml:2: \[extra\]: the key 'side' is missing"):
        load(train='base = "small"\n[extra]')


def test_a_list_element_by_its_number_keeps_the_rest(load):
    resolved = load(train='base = "small"\ngroups.0.options.lr = 2')
    assert resolved.config.groups == [Group(pattern=".*", options={"lr": 2, "b": (1, 2)})]
    assert load("--groups.0.options.b=[3, 4]", train='base = "small"').config.groups[0].options["b"] == (3, 4)


def test_a_whole_new_list(load):
    resolved = load(
        "--groups.1.options.lr=7",
        train='base = "small"\n[[groups]]\npattern = "a"\n[[groups]]\npattern = "b"\noptions.lr = 1',
    )
    assert resolved.config.groups == [Group(pattern="a"), Group(pattern="b", options={"lr": 7})]
    assert resolved.provenance["groups.1.options.lr"] == "command line"
    assert resolved.provenance["groups.1.pattern"] == "train.toml:5"
    assert load(train='base = "small"\ngroups = []').config.groups == []


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
        assert found == value
        assert type(found) is type(value)
        assert resolved.provenance[key] == "command line"


def test_the_last_of_two_command_line_values_wins(load):
    assert (
        load("--training.steps=1", "--training.steps", "2", train='base = "small"').config.training.steps == 2
    )


def test_several_values_that_a_dataclass_accepts_only_together(load):
    resolved = load(train='base = "small"\ntraining.batch = 9\ntraining.microbatch = 3')
    assert resolved.config.training.batch == 9


def test_a_rejected_value_is_blamed_with_all_that_it_depends_on(load):
    with pytest.raises(ConfigError) as caught:
        load(
            "--training.microbatch=5",
            train='base = "small"\nfolder = "innocent"\ntraining.batch = 16\ntraining.steps = 3',
        )
    assert str(caught.value) == (
        "command line: training.microbatch = 5: Training rejects this: 16 is not a multiple of 5."
    )
    with pytest.raises(ConfigError) as caught:
        load("--inner.radius=20", "--shape.radius=21", "--training.steps=7", train='base = "small"')
    assert str(caught.value) == (
        "command line: shape.radius = 21: Config rejects this: the circles do not fit. "
        "It goes together with command line: inner.radius = 20."
    )
    with pytest.raises(ConfigError) as caught:
        load(train='base = "small"\n[shape]\nradius = -1')
    assert str(caught.value) == "train.toml:3: shape.radius = -1: Circle rejects this: a radius is positive."


def test_of_two_rejected_values_the_first_is_told(load):
    with pytest.raises(ConfigError) as caught:
        load(train='base = "small"\ntraining.microbatch = 5\nshape.radius = -1')
    assert str(caught.value) == (
        "train.toml:2: training.microbatch = 5: Training rejects this: 8 is not a multiple of 5."
    )


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
    assert rule("training: odd.") == (
        "train.toml:1: training: odd. Written are training.steps = 3 (train.toml:3), "
        "training.batch = 4 (train.toml:4)."
    )


def test_values_that_toml_cannot_express_stay_the_base_s(load, tmp_path):
    resolved = load(train='base = "small"\ntraining.steps = 3')
    assert resolved.config.training.callback is len
    written = resolved.to_toml()
    assert "# callback: a Python builtin_function_or_method, which only the base can give" in written
    assert load(train=written).config == resolved.config


# Random settings for each key, spread over a parent file, the file and the command line.
NUMBERS = st.floats(0.5, 20) | st.integers(1, 20)
OPTIONS = (
    st.booleans() | st.integers() | st.text("ab \"'\\#=\n", max_size=5) | st.lists(st.integers(), max_size=2)
)
KEYS: dict[str, st.SearchStrategy[Any]] = {
    "folder": st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    "training.steps": st.integers(),
    "training.rate": NUMBERS,
    "training.note": st.text("none5", max_size=4),
    "training.mode": st.sampled_from(["fast", "slow"]),
    "training.parts": st.lists(st.lists(st.text("ab", max_size=2), max_size=2), max_size=2) | st.just("none"),
    "shape.class": st.sampled_from(["Circle", "Disc", f"{__name__}:Disc"]),
    "shape.radius": NUMBERS,
    "inner.class": st.sampled_from(["Circle", "Disc"]),
    "inner.radius": NUMBERS,
    "extra.side": NUMBERS,
    "options.a": st.integers(),
    "anything.x.y": OPTIONS,
    "groups.0.pattern": st.text("abc.*", max_size=4),
    "groups.0.options.lr": NUMBERS,
    "groups.0.options.b": st.lists(st.integers(), max_size=2),
    "groups.0.options.new": OPTIONS,
}
LAYER = st.fixed_dictionaries({}, optional=KEYS)


def toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_file(layer: dict[str, Any], head: str) -> str:
    return "\n".join([head, *(f"{key} = {toml(value)}" for key, value in layer.items())])


@settings(max_examples=150)
@given(parent=LAYER, child=LAYER, words=LAYER, replaced=st.booleans())
def test_the_resolved_toml_loads_to_an_equal_configuration(tmp_path_factory, parent, child, words, replaced):
    folder = tmp_path_factory.getbasetemp()
    new_list = "\n[[groups]]\npattern = 'x'\noptions.b = [1]\n[[groups]]\npattern = 'y'\n" if replaced else ""
    if replaced:
        parent = {key: value for key, value in parent.items() if not key.startswith("groups")}
    (folder / "parent.toml").write_text(toml_file(parent, 'base = "small"') + new_list)
    (folder / "child.toml").write_text(toml_file(child, 'extends = "parent.toml"'))
    base = make_base("small")
    before = copy.deepcopy(base)
    resolved = resolve(
        folder / "child.toml", [f"--{key}={toml(value)}" for key, value in words.items()], lambda name: base
    )
    assert base == before, "the base was changed"

    (folder / "saved.toml").write_text(resolved.to_toml())
    again = resolve(folder / "saved.toml", [], make_base)
    assert again.config == resolved.config
    assert list(again.provenance) == list(resolved.provenance), "a key was lost or came up"
    (folder / "changes.toml").write_text(resolved.to_toml(changed_only=True))
    assert resolve(folder / "changes.toml", [], make_base).config == resolved.config


PLAIN = {key: values for key, values in KEYS.items() if "." not in key or key.startswith("training")}
PLAIN_LAYER = st.fixed_dictionaries({}, optional=PLAIN)


@settings(max_examples=100)
@given(parent=PLAIN_LAYER, child=PLAIN_LAYER, words=PLAIN_LAYER)
def test_command_line_over_file_over_parent_over_base(tmp_path_factory, parent, child, words):
    folder = tmp_path_factory.getbasetemp()
    (folder / "parent.toml").write_text(toml_file(parent, 'base = "small"'))
    (folder / "child.toml").write_text(toml_file(child, 'extends = "parent.toml"'))
    resolved = resolve(
        folder / "child.toml", [f"--{key}={toml(value)}" for key, value in words.items()], make_base
    )
    (folder / "base.toml").write_text('base = "small"')
    unchanged = values_of(resolve(folder / "base.toml", [], make_base))
    for key, value in values_of(resolved).items():
        expected = {**unchanged, **parent, **child, **words}[key]
        source = (
            "command line"
            if key in words
            else "child"
            if key in child
            else "parent"
            if key in parent
            else "base"
        )
        assert value == (None if expected == "none" and key != "folder" else expected)
        assert source in resolved.provenance[key].rpartition("/")[2]
