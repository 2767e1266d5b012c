"""`wlb.policy` chooses the classes of three sections, alone; and a file may extend several."""

from dataclasses import dataclass, field

import pytest

from wlb_titan.config.load import resolve
from wlb_titan.config.settings import WlbSettings
from wlb_titan.errors import ConfigError
from wlb_titan.packing.plain import Plain


@dataclass(kw_only=True, slots=True)
class Base:
    wlb: WlbSettings = field(default_factory=WlbSettings)
    steps: int = 1


@pytest.fixture
def resolved(tmp_path):
    """A configuration of a file with this text over the base, where other files may lie."""

    def resolved(text, *overrides, **files):
        for name, content in files.items():
            (tmp_path / f"{name}.toml").write_text(content)
        (tmp_path / "job.toml").write_text(f'base = "b"\n{text}\n')
        return resolve(tmp_path / "job.toml", overrides, lambda name: Base())

    return resolved


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("wlb", "wlb/per_sequence/as_packed"),
        ("wlb_lazy/hybrid/best", "wlb_lazy/hybrid/best"),
        (" slim / hybrid ", "slim/hybrid/as_packed"),
        ("plain//best", "plain/per_sequence/best"),
        ("/ulysses", "plain/ulysses/as_packed"),
        ("wlb_titan.packing.plain:Plain/wlb_titan.context.hybrid:Hybrid", "plain/hybrid/as_packed"),
    ],
)
def test_it_names_three_classes_and_what_is_left_out_is_the_default(resolved, written, names):
    found = resolved(f'wlb.policy = "{written}"\nwlb.context.profile = "measured.json"')
    wlb = found.config.wlb
    assert [wlb.packing.name, wlb.context.name, wlb.pipeline.name] == names.split("/")
    assert wlb.context.profile == "measured.json"
    assert found.provenance["wlb.policy"].endswith("job.toml:2")
    again = resolved(found.to_toml().removeprefix('base = "b"'))
    assert again.config == found.config
    assert resolved("", "--wlb.policy", written).config.wlb.packing == wlb.packing


def test_without_it_the_base_decides_and_a_stronger_one_replaces_a_weaker_one_whole(resolved):
    assert resolved("").provenance["wlb.policy"] == "base b"
    other = 'wlb.policy = "wlb_lazy/hybrid/best"\nwlb.packing.max_delay = 3'
    extending = 'extends = "other.toml"'
    wlb = resolved(extending, other=other).config.wlb
    assert wlb.packing.max_delay == 3
    found = resolved(extending, "--wlb.policy", "slim")
    wlb = found.config.wlb  # without keys of other classes in weaker files
    names = [one.name for one in (wlb.packing, wlb.context, wlb.pipeline)]
    assert names == ["slim", "per_sequence", "as_packed"]
    assert found.provenance["wlb.policy"] == "command line"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('wlb.packing.policy = "wlb"', 'job.toml:2: wlb.packing.policy: .* wlb.policy = "PACKING/CONTEXT/'),
        ('[wlb.context]\npolicy = "hybrid"', "job.toml:3: wlb.context.policy: one key chooses all policies"),
        ('wlb.pipeline.order = "best"', "job.toml:2: wlb.pipeline.order: one key chooses all policies"),
        ('wlb.policy = "wlb/hybrid/best/more"', "job.toml:2: wlb.policy = .*too many parts"),
        ('wlb.policy = "wlb:hybrid"', "no packing policy is called 'wlb:hybrid'|cannot be imported"),
        ('wlb.policy = "lazy"', "no packing policy is called 'lazy'.*wlb_lazy"),
        ("wlb.policy = 5", "wlb.policy = 5: expected a string, PACKING/CONTEXT/ORDER"),
        ('wlb.policy = "plain"\nwlb.packing.max_delay = 3', '= 3: .*"plain" does not have it, but wlb_lazy'),
    ],
)
def test_other_words_are_refused_with_this_one(resolved, text, words):
    with pytest.raises(ConfigError, match=words):
        resolved(text)


def test_a_file_extends_several_and_the_later_is_stronger(resolved):
    files = {
        "job_of_all": 'steps = 2\nwlb.policy = "wlb"\nwlb.epochs = 2',
        "one": 'extends = "job_of_all.toml"\nsteps = 3\nwlb.trace_every = 3',
        "two": 'extends = "job_of_all.toml"\nwlb.policy = "slim"\nwlb.trace_every = 4',
    }
    found = resolved('extends = ["one.toml", "two.toml"]', **files)
    assert found.config.steps == 3, "what both extend is weaker than either"
    assert found.config.wlb.packing.name == "slim"
    assert (found.config.wlb.trace_every, found.config.wlb.epochs) == (4, 2)
    assert found.provenance["wlb.trace_every"].endswith("two.toml:3")
    assert resolved('extends = ["two.toml", "one.toml"]').config.wlb.trace_every == 3
    for value in ("5", "[5]", '["one.toml", "none.toml"]', '["job.toml"]'):
        with pytest.raises(ConfigError, match=r":2: extends = .*(expected the path|No such file|circle)"):
            resolved(f"extends = {value}")


class Shallow(Plain):
    @dataclass(kw_only=True, slots=True)
    class Config(Plain.Config):
        depth: int = 1

        def __post_init__(self) -> None:
            if self.depth > 1:
                raise ValueError("too deep for this policy")


def test_what_a_policy_refuses_is_what_its_section_says(resolved):
    text = f'wlb.policy = "{__name__}:Shallow"\nwlb.packing.depth = 3'
    with pytest.raises(ConfigError, match=r":3: wlb\.packing\.depth = 3: Shallow rejects this: too deep"):
        resolved(text)
