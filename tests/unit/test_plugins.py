"""Plug-ins that the project does not know pass configuration, planner, memory and simulator."""

from dataclasses import replace
from importlib.metadata import EntryPoint

import numpy as np
import planning
import pytest

from wlb_titan import plugins
from wlb_titan.config.build import Builder
from wlb_titan.config.settings import WlbSettings
from wlb_titan.config.sources import read_sources
from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.attention_kernels import hopper
from wlb_titan.cost.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.errors import ConfigError, UserError
from wlb_titan.job import Job, Policy
from wlb_titan.packing import POLICIES
from wlb_titan.plan import COUNT
from wlb_titan.simulator.choice import Scenario

LENGTHS = np.random.default_rng(0).integers(5, 900, 2000)


def configured(tmp_path, text, *words):
    (tmp_path / "t.toml").write_text(text)
    return Builder(WlbSettings(), "base", {}, {}).build(read_sources(tmp_path / "t.toml", words).layers)


def test_a_policy_of_one_s_own_is_named_by_its_module(tmp_path):
    settings = configured(tmp_path, '[packing]\npolicy = "toys:Reversed"\nevery = 2\ntail = "drop"')
    assert settings.packing.name == "toys:Reversed"
    assert (settings.packing.every, settings.packing.tail) == (2, "drop")
    ours, plain = (
        planning.make_planner(LENGTHS, window=1024, micro_batches=4, packing=packing)
        for packing in (replace(settings.packing, tail="carry"), "plain")
    )
    for step in range(4):
        mine, theirs = (planner.next().micro_batches for planner in (ours, plain))
        order = theirs if step % 2 else theirs[::-1]
        assert [m.documents.tolist() for m in mine] == [m.documents.tolist() for m in order]


def test_policies_of_entry_points_come_in_one_order_on_all_hosts(monkeypatch):
    points = [EntryPoint(name, "toys:Reversed", "wlb_titan.packing") for name in ("b_own", "a_own")]
    for listing in (points, points[::-1]):
        plugins._installed.cache_clear()
        monkeypatch.setattr(plugins, "entry_points", lambda group, listing=listing: listing)
        assert POLICIES.names[-2:] == ("a_own", "b_own") == tuple(POLICIES.candidates[-2:])
    assert POLICIES.configure("b_own", every=3).name == "a_own"  # the first name of the class
    assert Policy.parse("b_own:hybrid").packing == "b_own"
    plugins._installed.cache_clear()


def test_a_strategy_of_one_s_own_passes_planner_memory_and_simulator():
    job = Job(window=4096, micro_batches=4, degrees=Degrees(context=4, pipeline=2))
    scenario = Scenario(job, Documents(lengths=np.full(100, 4096)))
    zigzag, contiguous = (
        scenario.predict(Policy("plain", sharding), 3) for sharding in ("per_sequence", "toys:Contiguous")
    )
    assert contiguous.seconds.mean() > zigzag.seconds.mean()  # its last rank works longest
    assert contiguous.peak_memory.total == zigzag.peak_memory.total
    (plan,) = scenario.plans(Policy("plain", "toys:Contiguous"), 1)
    assert {m.sharding for m in plan.micro_batches} == {"contiguous"}


def test_changing_the_policy_keeps_what_both_have(tmp_path):
    text = '[packing]\npolicy = "wlb"\nmax_length = 2048\nthresholds = [64]'
    lazy = configured(tmp_path, text, "--packing.policy", "wlb_lazy").packing
    assert (lazy.name, lazy.max_length, lazy.max_delay) == ("wlb_lazy", 2048, 16)
    with pytest.raises(ConfigError, match=r'policy = "plain" does not have it, but wlb, wlb_lazy'):
        configured(tmp_path, '[packing]\npolicy = "plain"\nmax_length = 2048')


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wlb_lasy", r"no packing policy is called 'wlb_lasy'. Did you mean 'wlb_lazy'\?"),
        ("toys:Nothing", "cannot be imported: module 'toys' has no attribute 'Nothing'"),
        ("nowhere:Policy", "cannot be imported: No module named 'nowhere'"),
        ("toys:Contiguous", "is not a packing policy: it does not derive from"),
    ],
)
def test_names_that_lead_nowhere(name, message):
    with pytest.raises(UserError, match=message):
        POLICIES.find(name)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(4, 2, 3), (6, 6, 4), (32, 8, 16), (8, 8, 8), (5, 1, 3)]
)
def test_ulysses_shares_every_head_once_and_keys_with_their_queries(heads, kv_heads, ranks):
    from wlb_titan.context.ulysses import head_shares

    shares = head_shares(heads, kv_heads, ranks)
    assert [h for s in shares for h in range(heads)[s.queries]] == list(range(heads))
    group = heads // kv_heads
    for share in shares:
        queries, keys = range(heads)[share.queries], range(kv_heads)[share.keys]
        assert {query // group for query in queries} == set(keys)
        assert len(queries) % len(keys) == 0  # what the kernel needs of grouped queries
    sizes = [len(range(heads)[s.queries]) for s in shares]
    assert max(sizes) - min(sizes) <= group


def test_ulysses_balances_whatever_the_documents_are():
    strategy = STRATEGIES.configure("ulysses").make(4, hopper(128, 8))
    lengths = np.array([4000, 10, 10, 76])
    _, shards = strategy.shard(lengths, 4096)
    assert sum(int(shard[:, COUNT].sum()) for shard in shards) == 4096
    assert np.ptp(strategy.seconds(shards), axis=0).tolist() == [0, 0]
    with pytest.raises(UserError, match="4 context-parallel ranks cannot share 3 query heads"):
        STRATEGIES.configure("ulysses").make(4, hopper(128, 3)).seconds(shards)
