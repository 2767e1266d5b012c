"""Plug-ins that the project does not know pass configuration, planner, memory and simulator."""

from dataclasses import replace
from importlib.metadata import EntryPoint

import numpy as np
import planning
import pytest
from toys import Apart, Twins

from wlb_titan import plugins
from wlb_titan.config.settings import WlbSettings
from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.context.ulysses import head_shares
from wlb_titan.cost.workload import COST_MODELS
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.dimensions.dimension import DIMENSIONS
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError, UserError
from wlb_titan.job import Job, Policy
from wlb_titan.packing import POLICIES
from wlb_titan.pipeline.order import ORDERS
from wlb_titan.simulator.choice import Scenario
from wlb_titan.simulator.search import degrees_of
from wlb_titan.simulator.step import meetings, own_weights, seconds_with_meetings, simulate
from wlb_titan.toml.build import Builder
from wlb_titan.toml.sources import read_sources

LENGTHS = np.random.default_rng(0).integers(5, 900, 2000)
REVERSED, CONTIGUOUS = "own_policies.packing:Reversed", "own_policies.sharding:Contiguous"


def configured(tmp_path, text, *words):
    (tmp_path / "t.toml").write_text(text)
    return Builder(WlbSettings(), "base", {}, {}).build(read_sources(tmp_path / "t.toml", words))


def test_a_policy_of_one_s_own_is_named_by_its_module(tmp_path):
    text = f'[packing]\npolicy = "{REVERSED}"\nevery = 2\ncost_model = "quadratic:1,9"'
    settings = configured(tmp_path, text)
    assert settings.packing.name == REVERSED
    assert (settings.packing.every, settings.packing.cost_model) == (2, "quadratic:1,9")
    how = {"window": 1024, "micro_batches": 4}
    ours, plain = (planning.make_planner(LENGTHS, packing=one, **how) for one in (settings.packing, "plain"))
    for step in range(4):
        mine, theirs = (planner.next().micro_batches for planner in (ours, plain))
        order = theirs if step % 2 else theirs[::-1]
        assert [m.documents.tolist() for m in mine] == [m.documents.tolist() for m in order]


def test_policies_of_entry_points_come_in_one_order_on_all_hosts(monkeypatch):
    points = [EntryPoint(name, REVERSED, "wlb_titan.packing") for name in ("b_own", "a_own")]
    for listing in (points, points[::-1]):
        plugins._installed.cache_clear()
        monkeypatch.setattr(plugins, "entry_points", lambda group, listing=listing: listing)
        assert POLICIES.names[-2:] == ("a_own", "b_own") == tuple(POLICIES.candidates[-2:])
    assert POLICIES.configure("b_own", every=3).name == "a_own"  # the first name of the class
    assert Policy.parse("b_own/hybrid").packing == "b_own"
    plugins._installed.cache_clear()


def test_a_strategy_of_one_s_own_passes_planner_memory_and_simulator():
    job = Job(window=4096, micro_batches=4, degrees=Degrees(context=4, pipeline=2))
    scenario = Scenario(job, Documents(lengths=np.full(100, 4096)))
    policies = (Policy("plain", "per_sequence"), Policy("plain", CONTIGUOUS))
    zigzag, contiguous = (scenario.predict(policy, 3) for policy in policies)
    assert contiguous.seconds.mean() > zigzag.seconds.mean()  # its last rank works longest
    assert contiguous.peak_memory.total == zigzag.peak_memory.total
    (plan,) = scenario.plans(Policy("plain", CONTIGUOUS), 1)
    assert {m.sharding for m in plan.micro_batches} == {"contiguous"}


def test_changing_the_policy_keeps_what_both_have(tmp_path):
    text = '[packing]\npolicy = "wlb"\nmax_length = 2048\nthresholds = [64]'
    lazy = configured(tmp_path, text, "--packing.policy", "wlb_lazy").packing
    assert (lazy.name, lazy.max_length, lazy.max_delay) == ("wlb_lazy", 2048, 16)


def test_names_that_lead_nowhere():
    for name, message in (
        ("wlb_lasy", r"no packing policy is called 'wlb_lasy'. Did you mean 'wlb_lazy'\?"),
        ("toys:Nothing", "cannot be imported: module 'toys' has no attribute 'Nothing'"),
        ("nowhere:Policy", "cannot be imported: No module named 'nowhere'"),
        (CONTIGUOUS, "is not a packing policy: it does not derive from"),
    ):
        with pytest.raises(UserError, match=message):
            POLICIES.find(name)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(4, 2, 3), (6, 6, 4), (32, 8, 16), (8, 8, 8), (5, 1, 3)]
)
def test_ulysses_shares_every_head_once_and_keys_with_their_queries(heads, kv_heads, ranks):
    shares = head_shares(heads, kv_heads, ranks)
    assert [h for s in shares for h in range(heads)[s.queries]] == list(range(heads))
    group = heads // kv_heads
    for share in shares:
        queries, keys = range(heads)[share.queries], range(kv_heads)[share.keys]
        assert {query // group for query in queries} == set(keys)
        assert len(queries) % len(keys) == 0  # what the kernel needs of grouped queries
    sizes = [len(range(heads)[s.queries]) for s in shares]
    assert max(sizes) - min(sizes) <= group


JOB = Job(window=8192, micro_batches=8, degrees=Degrees(tensor=8, shard=2))


def with_own(*own, **degrees):
    return replace(JOB, degrees=replace(JOB.degrees, own=own, **degrees))


def predicted(job, steps=6):
    return simulate(job, job.plans(Documents(lengths=LENGTHS * 10), steps))


def test_what_divides_data_gets_micro_batches_and_what_does_not_gets_the_same():
    both = with_own(Apart.Config(degree=2), Twins.Config(degree=4))
    assert (both.degrees.ranks, both.degrees.data) == (8 * 2 * 2 * 4, 4)
    assert both.replica_micro_batches == 2
    assert "APART 2" in str(both.degrees) and "TWINS 4" in str(both.degrees)
    assert both.degrees.strides["twins"] == 8 and both.degrees.strides["dp_shard"] == 32


def test_every_place_has_the_data_parallel_rank_whose_micro_batches_it_gets():
    """Where the user's own dimension divides data, its place counts; where one does not, it is the same."""
    degrees = with_own(Apart.Config(degree=2), Twins.Config(degree=3), replicate=2, pipeline=2).degrees
    ranks = np.arange(degrees.ranks).reshape(list(degrees.layout.values()))
    for place in np.ndindex(ranks.shape):
        named = dict(zip(degrees.layout, place, strict=True))
        first = {axis: 0 if axis in ("pp", "cp", "tp", "twins") else at for axis, at in named.items()}
        assert degrees.ends_of(degrees.replica_at(named))[0] == ranks[tuple(first.values())]


def test_ranks_wait_for_each_other_when_they_meet():
    """Of two ranks that are slow in turn, one waits in every step, or neither if they meet in every other."""
    job, seconds = with_own(Apart.Config(degree=2), shard=1), np.array([[1.0, 3.0], [3.0, 1.0]] * 2)
    numbers = np.arange(1, 5)
    assert seconds_with_meetings(JOB, seconds, numbers).sum() == 12
    assert seconds_with_meetings(job, seconds, numbers) == pytest.approx([3, 1, 3, 1])


def test_a_meeting_is_in_the_steps_that_have_one():
    job = with_own(Apart.Config(degree=2))
    ((_, _, seconds),) = meetings(job)
    link = job.cluster.link(2, 16)
    assert seconds == pytest.approx(2 * link.collective(4 * own_weights(job), 2))
    steps = predicted(job)
    extra = steps.communication[1::2].min() - steps.communication[::2].max()
    assert extra == pytest.approx(seconds, rel=0.05)


def test_it_changes_the_times_of_passes():
    """Forward passes twice as long, in a job whose ranks do the same as without."""
    alone, twins = predicted(JOB), predicted(with_own(Twins.Config(degree=2)))
    assert 1.2 < (twins.pipeline / alone.pipeline).mean() < 1.5


def test_a_search_leaves_it_as_it_is_and_its_ranks_share_no_micro_batch():
    found = list(degrees_of(with_own(Apart.Config(degree=2)), 32))
    assert found and all(degrees.ranks == 32 and degrees.own for degrees in found)
    assert not list(degrees_of(with_own(Apart.Config(degree=2)), 33))
    slim = POLICIES.configure("slim", dp_merge=True)
    with pytest.raises(PlanError, match="have different weights"):
        _ = replace(with_own(Apart.Config(degree=2)), packing=slim).by_sharers


RULES = {
    "Loses": "[0-9,]+ tokens that were read are neither packed, waiting nor counted as lost",
    "Twice": "tokens of document [0-9]+ are there twice|at most 1,024 are allowed",
    "TwiceMuchLater": "tokens of document [0-9]+ are there twice",
    "Fewer": "a step has 4 micro-batches, and not 3",
    "Beyond": "a piece of document [0-9]+ goes past its end, or past what was read of it",
    "Before": "a start from 0 on",
    "Unread": "a piece has the id of a document that was read",
    "Empty": "micro-batch 0 has no token for each context-parallel rank, or none to predict|at most 1,024",
    "Nothing": r"next\(\) returns a Packing, and not None",
    "Forgets": "[0-9,]+ tokens that were read are neither packed",
    "OneRank": "`assigned` gives each micro-batch to a data-parallel rank",
}
DIVISIONS = dict.fromkeys(("Overlap", "Misses"), "every token of a micro-batch lies on one rank")
DIVISIONS["Uneven"] = "each of 2 ranks has 512 tokens at most"


@pytest.mark.parametrize(("name", "rule"), [*RULES.items(), *DIVISIONS.items()])
def test_classes_of_others_are_held_to_their_rules(name, rule):
    """In one sentence that names the class, before anything trains; whatever the first step is like."""
    policies = {"sharding": f"toys_wrong:{name}"} if name in DIVISIONS else {"packing": f"toys_wrong:{name}"}
    degrees = {"data_parallel": 2, "context_parallel": 2}
    planner = planning.make_planner(LENGTHS, window=1024, micro_batches=4, **policies, **degrees)
    said = f"^toys_wrong:{name} breaks a rule of [a-z ]+ .docs/extending.md.: .*({rule})"
    with pytest.raises(PlanError, match=said):
        planner.hold_to_rules()


def test_an_order_gives_each_micro_batch_one_place():
    order = ORDERS.configure("toys_wrong:Repeats")
    job = Job(window=1024, micro_batches=4, degrees=Degrees(pipeline=2), order=order)
    with pytest.raises(PlanError, match="toys_wrong:Repeats breaks the rule of orders"):
        job.planner(Documents(lengths=LENGTHS)).next()


MISFITS = [
    (STRATEGIES, "OldDivide", r"divide\(self, lengths, total\) is called as divide\(self, lengths: .*slices"),
    (STRATEGIES, "OldMaking", r"__init__\(self, config, ranks, latency\) is called as .*moves"),
    (POLICIES, "NewNeed", r"load_state_dict\(self, state, version\) is called as load_state_dict"),
    (POLICIES, "Called", r"waiting\(self\) is called as waiting\."),
    (POLICIES, "Lacking", "it lacks variable_length, balances, state_dict, load_state_dict"),
    (POLICIES, "OldLongest", r"longest\(self\) is called as longest\(self, fitting"),
    (COST_MODELS, "OldCost", r"of\(self, config, job\) is called as of\(cls, config"),
    (DIMENSIONS, "OldPeak", r"memory\(self, peak\) is called as memory\(self, rates"),
]


@pytest.mark.parametrize(("family", "name", "misfit"), MISFITS)
def test_a_class_of_another_interface_is_refused_when_it_is_loaded(family, name, misfit):
    with pytest.raises(UserError, match=f"^toys_wrong:{name}.* .*does not fit.*: .*{misfit}"):
        family.find(f"toys_wrong:{name}")
    assert STRATEGIES.find("toys_wrong:Wider").__name__ == "Wider"


def test_a_policy_that_asks_for_the_job_is_told_what_there_is():
    job = Job(window=64, micro_batches=2, packing=POLICIES.configure("toys_wrong:OldJob"))
    with pytest.raises(PlanError, match=r"no job and no 'degrees', but .*: micro_batches, .* context, "):
        job.planner(Documents(lengths=np.full(8, 64)))


def test_one_that_does_not_fit_is_left_out_of_what_auto_tries(monkeypatch):
    plugins._installed.cache_clear()
    point = EntryPoint("old", "toys_wrong:NewNeed", "wlb_titan.packing")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point])
    with pytest.warns(UserWarning, match="packing policy 'old' is left out: toys_wrong:NewNeed"):
        assert "plain" in POLICIES.candidates and "old" not in POLICIES.candidates
    plugins._installed.cache_clear()


def test_a_step_is_whole_runs_through_the_pipeline():
    """16 micro-batches of a replica in runs of 15 used to end in an assertion of the order."""
    facts = {"window": 1024, "schedule": "InterleavedZeroBubble", "chunks": 2}
    facts |= {"order": ORDERS.configure("best"), "degrees": Degrees(pipeline=3, shard=4)}
    with pytest.raises(PlanError, match="16 micro-batches of a step cannot be divided into") as refused:
        Job(micro_batches=64, per_run=15, **facts)
    assert refused.value.setting == "training.local_batch_size"
    plan = Job(micro_batches=60, per_run=15, **facts).planner(Documents(lengths=LENGTHS)).next()
    assert len(plan.micro_batches) == 60
