"""What holds for every packing policy, on corpora that hypothesis makes up."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planning import make_planner
from slicing import PACKINGS as SLICED
from slicing import assert_conserved

from wlb_titan.bins import REMAINS, Bins
from wlb_titan.cost.cluster import load_cluster
from wlb_titan.errors import PlanError
from wlb_titan.layers.recompute import MemorySettings
from wlb_titan.packing import POLICIES, rules
from wlb_titan.packing.fixed import Milp, solved
from wlb_titan.packing.wlb import PATIENCE
from wlb_titan.plan import DELAY, ID, LENGTH, START

pytestmark = pytest.mark.filterwarnings("ignore:With the thresholds")  # of corpora that hypothesis makes up

WINDOW = 64
ROOMY = replace(load_cluster("h100_roce"), memory=1e14)
PACKINGS = {
    "plain": POLICIES.configure("plain"),
    "dealt": POLICIES.configure("dealt"),
    "fixed_greedy": POLICIES.configure("fixed_greedy"),
    "fixed_greedy-3": POLICIES.configure("fixed_greedy", global_batches=3),
    "fixed_solver": POLICIES.configure("fixed_solver", time_limit=0.2),
    "wlb": POLICIES.configure("wlb", thresholds=[40, 56]),
    "wlb-tight": POLICIES.configure("wlb", thresholds=[60], max_length=WINDOW),
    "wlb_lazy": POLICIES.configure("wlb_lazy", max_delay=5),
    "wlb_lazy-tight": POLICIES.configure("wlb_lazy", max_length=WINDOW + 16),
}
SHARED = {"dealt-2": POLICIES.configure("dealt", sharers=2)}
EVERY = PACKINGS | SLICED | SHARED
REPEATABLE = {name: one for name, one in EVERY.items() if name != "fixed_solver"}
every_policy = pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
repeatable = pytest.mark.parametrize("packing", REPEATABLE.values(), ids=REPEATABLE)

# Many short documents and a tail that reaches beyond the window; single tokens too.
corpora = st.lists(
    st.one_of(st.integers(1, 12), st.integers(1, 40), st.integers(30, 150)), min_size=8, max_size=60
).filter(lambda lengths: sum(length > 1 for length in lengths) >= len(lengths) // 2)


def saved(job):
    """A planner's state, as a checkpoint has it."""
    return json.loads(json.dumps(job.state_dict(), default=np.ndarray.tolist))


def planner(packing, lengths, micro_batches=4, **changes):
    arguments = {"window": WINDOW, "seed": 7, "fingerprint": "corpus", "cluster": ROOMY, **changes}
    if getattr(packing, "asymmetric", False):
        arguments |= {"pipeline_parallel": 2, "memory": MemorySettings(checkpointing="full")}
    return make_planner(lengths, micro_batches=micro_batches, packing=packing, **arguments)


def contents(plan):
    """The documents of every micro-batch, whichever rank runs it; of slices all that the plan says."""
    if plan.flows is not None:
        return plan.to_json() | {"plan_ms": 0}
    return sorted(m.documents.tolist() for m in plan.micro_batches)


@every_policy
@settings(max_examples=15)
@given(lengths=corpora, own=st.integers(1, 3), ranks=st.integers(1, 2))
def test_tokens_are_conserved_and_micro_batches_are_sound(packing, lengths, own, ranks):
    job = planner(packing, lengths, own * ranks, context_parallel=2, data_parallel=ranks)
    plans = [job.next() for _ in range(9)]
    assert_conserved(job, plans)
    assert packing.name in ("plain", "dealt") or not any(plan.lost_tokens for plan in plans)
    limit = getattr(packing, "max_length", None) or 2 * WINDOW
    for iteration, plan in enumerate(plans):
        assert plan.iteration == iteration
        assert [(m.dp_rank, m.index) for m in plan.micro_batches] == list(np.ndindex(ranks, own))
        for m in plan.micro_batches:
            tokens = m.documents[:, LENGTH]
            assert m.length == tokens.sum() + m.padding
            assert m.length % 4 == 0
            assert tokens.max() <= WINDOW
            if job.fixed_length:
                assert m.length == WINDOW
            else:
                assert m.length <= limit and m.padding < 4
            assert job._stream.has_label(m.documents).any()
            assert m.workload == pytest.approx(float((tokens * tokens + 40 * tokens).sum()))
            assert ((m.documents[:, DELAY] >= 0) & (m.documents[:, DELAY] <= iteration)).all()
        for rank in range(ranks) if packing.name != "plain" else ():
            works = [m.workload for m in plan.of_rank(rank)]
            assert works == sorted(works, reverse=True)


@repeatable
@settings(max_examples=15)
@given(lengths=corpora, before=st.integers(0, 6))
def test_a_saved_state_gives_the_same_future(packing, lengths, before):
    """On other ranks too, where the policy does not pack for them."""
    degrees = {"context_parallel": 2, "sharding": "per_document"}
    job = planner(packing, lengths, data_parallel=2, **degrees)
    for _ in range(before):
        job.next()
    again = planner(packing, lengths, data_parallel=2 if packing.owner.slices else 4, **degrees)
    again.load_state_dict(saved(job))
    for _ in range(6):
        ours, theirs = job.next(), again.next()
        assert ours.iteration == theirs.iteration
        assert contents(ours) == contents(theirs)
    assert saved(job) == saved(again)


@repeatable
def test_every_rank_plans_the_same_and_divides_and_orders_its_own(packing):
    lengths = np.random.default_rng(1).integers(1, 100, 80)
    micro_batches = 2 if packing.owner.slices else 4
    degrees = {"data_parallel": 2, "context_parallel": 2, "pipeline_parallel": 2, "sharding": "hybrid"}
    asked = (0, 1), (0,), (1,)  # whose micro-batches are divided
    planners = [planner(packing, lengths, micro_batches, **degrees) for _ in asked]
    steps = [[one.next(sharded=own) for one, own in zip(planners, asked, strict=True)] for _ in range(6)]
    for whole, *alone in steps:
        assert {plan.digest(0) for plan in alone} == {whole.digest(0)}
        for rank, plan in enumerate(alone):
            if plan.flows is not None:
                assert plan.flows[rank] == whole.flows[rank] and plan.flows[1 - rank] == ()
            assert all((m.ranks is not None) == (m.dp_rank == rank) for m in plan.micro_batches)
            assert [m.to_json() for m in plan.of_rank(rank)] == [m.to_json() for m in whole.of_rank(rank)]
            digest = plan.own_digest(rank, 0)
            assert digest == whole.own_digest(rank, 0) != plan.own_digest(rank, 1)
            first, others = plan.of_rank(rank)[0], plan.micro_batches
            for other in ({"sharding": "other"}, {"ranks": first.ranks[::-1]}, {"mix": np.ones((1, 4), int)}):
                changed = tuple(replace(m, **other) if m is first else m for m in others)
                assert replace(plan, micro_batches=changed).own_digest(rank, 0) != digest, other
    assert any(m.merged for whole, *_ in steps for m in whole.micro_batches) == (packing.merges is True)


def test_plain_keeps_the_order():
    lengths = np.random.default_rng(2).integers(1, 90, 100)
    plan = planner(PACKINGS["plain"], lengths, data_parallel=2).next()
    rows = np.concatenate([m.documents for m in plan.micro_batches])
    assert (np.lexsort((rows[:, START], rows[:, ID])) == np.arange(len(rows))).all()


@settings(max_examples=30)
@given(lengths=corpora, sharers=st.sampled_from([1, 2, 4]))
def test_dealt_has_the_windows_of_plain_in_every_step(lengths, sharers):
    dealt = POLICIES.configure("dealt", sharers=sharers)
    jobs = [planner(packing, lengths, 8, data_parallel=4) for packing in (PACKINGS["plain"], dealt)]
    for _ in range(4):
        plain, ours = (job.next() for job in jobs)
        assert (ours.lost_tokens, ours.tokens) == (plain.lost_tokens, plain.tokens)
        windows = {tuple(m.documents[0]): m.documents for m in plain.micro_batches}
        for pack in ours.packs:
            assert (pack.sharers, pack.length) == (sharers, WINDOW)
            rest = pack.documents
            for _ in range(sharers):
                window = windows.pop(tuple(rest[0]))
                assert (rest[: len(window)] == window).all()
                rest = rest[len(window) :]
            assert not len(rest)
        assert not windows


def test_the_more_ranks_share_the_more_equal_is_their_work():
    plain = PACKINGS["plain"]
    packings = [plain, *(POLICIES.configure("dealt", sharers=sharers) for sharers in (1, 2, 4))]
    of_micro_batches, of_ranks = [], []
    for packing in packings:
        job = planner(packing, TAILED, 16, data_parallel=4, cost="quadratic:1,40")
        plans = [job.next() for _ in range(40)]
        of_micro_batches.append(np.mean([plan.imbalance for plan in plans]))
        sums = [[sum(m.workload for m in plan.of_rank(rank)) for rank in range(4)] for plan in plans]
        of_ranks.append(np.mean([max(each) / np.mean(each) for each in sums]))
    assert of_micro_batches[0] == of_micro_batches[1] and of_ranks[1] < 1.02 < of_ranks[0]
    assert of_micro_batches[1:] == sorted(of_micro_batches[1:], reverse=True) and of_micro_batches[3] < 1.1


def test_a_window_of_single_tokens_keeps_its_last_place_for_a_label():
    lengths = [1] * 150 + [5]
    job = planner(PACKINGS["plain"], lengths, micro_batches=2, seed=None)
    plan = job.next()
    first, second = plan.micro_batches
    assert first.documents[-1].tolist() == [150, 0, 1, 0, 150]  # the long document's first token
    assert plan.lost_tokens == 150 - 63
    assert second.documents[0].tolist() == [150, 1, 4, 0, 150]


SHARING = {"data_parallel": 2, "context_parallel": 2}
TAILED = (np.random.default_rng(3).pareto(0.9, 4000) * 4 + 2).clip(2, WINDOW).astype(np.int64)


def test_wlb_lazy_releases_at_max_delay():
    for bound in (0, 1, 3):
        packing = replace(PACKINGS["wlb_lazy"], max_delay=bound, tolerance=1e-3, max_length=2 * WINDOW)
        job = planner(packing, TAILED)
        assert max(job.next().max_delay for _ in range(300)) == bound


def test_a_smaller_tolerance_balances_better_and_waits_longer():
    def run(tolerance):
        job = planner(POLICIES.configure("wlb_lazy", tolerance=tolerance, max_delay=50), TAILED)
        plans = [job.next() for _ in range(300)]
        tokens = sum(plan.tokens for plan in plans)
        return np.mean([p.imbalance for p in plans]), sum(p.delay * p.tokens for p in plans) / tokens

    (balanced, patient), (rough, hasty) = run(0.02), run(0.5)
    assert balanced < rough
    assert patient > hasty


@settings(max_examples=12)
@given(st.lists(st.integers(5, 40), min_size=5, max_size=9), st.integers(0, 30))
def test_the_solver_finds_the_optimum_and_is_never_worse_than_greedy(lengths, room):
    packs, lengths = 3, -np.sort(-np.array(lengths))
    work = lengths.astype(float) ** 2
    window = int(lengths.sum()) // packs + room
    start = Bins(packs, window).place(lengths, work)
    assume((start != REMAINS).all())
    milp = Milp(10.0, 0.0, user="A test", setting="packing.policy")

    def largest(assigned):
        return np.bincount(assigned, work, packs).max()

    assigned, gap = solved(milp, lengths, start, packs, window)
    everything = (np.array(one) for one in np.ndindex(*[packs] * len(lengths)))
    best = min(largest(one) for one in everything if np.bincount(one, lengths).max() <= window)
    assert largest(assigned) == best <= largest(start)
    assert gap < 1e-6
    assert np.bincount(assigned, lengths).max() <= window
    nothing = Milp(1e-9, 0.0, user="A test", setting="packing.policy")
    late, unproven = solved(nothing, lengths, start, packs, window)
    assert (late == start).all() and 0 <= unproven < 1


@repeatable
@pytest.mark.long
def test_memory_stays_constant(packing):
    lengths = (np.random.default_rng(6).pareto(1.0, 3000) * 6 + 1).clip(1, 200).astype(np.int64)
    job = planner(packing, lengths, data_parallel=2)
    sizes = []
    for step in range(400 if packing.owner.slices else 1200):
        job.next(sharded=())
        if step % 100 == 99:
            sizes.append(len(json.dumps(saved(job))))
    half = len(sizes) // 2
    assert max(sizes[half:]) < 1.5 * max(sizes[:half]) + 500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 8}, "its seed is 7, and this job's is 8"),
        ({"fingerprint": "other"}, "corpus fingerprint is 'corpus', and this job's is 'other'"),
        ({"window": 32, "packing": PACKINGS["plain"]}, "context window is 64, and this job's is 32"),
        ({"version": 3}, "has version 3, and this wlb_titan reads version 4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_states_that_cannot_be_continued_are_refused(changes, message):
    arguments = {"packing": PACKINGS["wlb"], "lengths": np.random.default_rng(8).integers(1, 90, 50)}
    state = saved(planner(**arguments))
    if "version" in changes:
        state, changes = {**state, **changes}, {}
    with pytest.raises(PlanError, match=message):
        planner(**{**arguments, **changes}).load_state_dict(state)


def test_a_checkpoint_of_an_earlier_version_is_continued():
    """As it lies on disk: fixed names, and the cursor after what the stream gave."""
    corpus = {"corpus_fingerprint": "corpus", "documents": 4, "mixture": [[4, 1.0, None, None]], "seed": None}
    settings = {"context_window": 64, "packing_policy": "wlb_lazy", "micro_batches": 1}
    stream = {"document": 3, "offset": 0, "first": [[0, 10, 20]]}
    packing = {"arrivals": {"iteration": 2, "surplus": 0}, "left": 5}
    state = {"version": 4, **corpus, **settings, "iteration": 2, "stream": stream, "packing": packing}
    job = planner(PACKINGS["wlb_lazy"], [30, 40, 50, 60], micro_batches=1, seed=None)
    job.load_state_dict(json.loads(json.dumps(state | {"waiting": [[1, 30, 10, 1]]})))
    first, second = job.next(), job.next()
    trained = sorted([*first.documents.tolist(), *second.documents.tolist()])
    expected = [[0, 10, 20, 0, 0], [1, 30, 10, 1, 1], [3, 0, 60, 0, 3], [4, 0, 30, 0, 0], [5, 0, 40, 0, 1]]
    assert (first.iteration, trained) == (2, expected)


GOES_ON = [(name, name) for name in ("plain", "dealt-2", "fixed_greedy-3", "wlb", "wlb_lazy")]
GOES_ON += [("slim", "slim"), ("merged", "merged"), ("plain", "wlb"), ("fixed_greedy-3", "plain")]
GOES_ON += [("wlb", "slim"), ("merged", "wlb_lazy")]


@pytest.mark.filterwarnings("ignore:Queues lose")
@pytest.mark.parametrize(("before", "after"), GOES_ON)
@pytest.mark.parametrize("micro_batches", [8, 4])
def test_a_job_goes_on_with_the_documents_that_were_left(before, after, micro_batches):
    """Half of its nodes are lost; thresholds and L_max are worked out again, and come out otherwise. The
    policy, which `auto` chooses, and the number of micro-batches may be others too."""
    lengths = np.random.default_rng(5).lognormal(2.8, 1.0, 300).astype(int).clip(1, 150)

    def made(name, number, ranks, memory):
        return planner(
            replace(PACKINGS["wlb"], thresholds="auto") if name == "wlb" else EVERY[name],
            lengths,
            number,
            data_parallel=ranks,
            context_parallel=8 // ranks,
            cost="quadratic:1,40" if ranks == 4 else "quadratic:1,4000",  # as one that follows the degrees
            cluster=replace(load_cluster("h100_roce"), memory=memory),
            sharding="per_document",
        )

    job = made(before, 8, 4, 160e9)
    plans = [job.next() for _ in range(5)]
    again = made(after, micro_batches, 2, 1e9 if after in ("wlb", "wlb_lazy") else 160e9)
    if before == after == "wlb":
        assert (job._job.longest_micro_batch, again._job.longest_micro_batch) == (2 * WINDOW, WINDOW)
        assert job.policy.thresholds != again.policy.thresholds
    again.load_state_dict(saved(job))
    plans += [again.next() for _ in range(2)]
    assert_conserved(again, plans)
    third = made(before, 8, 4, 160e9)  # also what was given back is saved
    third.load_state_dict(saved(again))
    assert_conserved(third, plans + [third.next() for _ in range(12)])


hostile = st.one_of(
    st.lists(st.integers(1, 10), min_size=60, max_size=90),
    st.lists(st.sampled_from([1, 2, 3, 63, 64, 65, 67]), min_size=30, max_size=60),  # around the window
).filter(lambda lengths: sum(length > 1 for length in lengths) >= len(lengths) // 2)


@pytest.mark.parametrize("packing", EVERY.values(), ids=EVERY)
@settings(max_examples=8)
@given(lengths=hostile, context=st.sampled_from([1, 2, 4, 8]), ranks=st.sampled_from([1, 2]))
def test_policies_of_ours_keep_the_rules_for_those_of_others(packing, lengths, context, ranks):
    """Tiny documents, cut tails, windows of one document; by the cost short documents are nearly nothing."""
    arguments = {"context_parallel": context, "data_parallel": ranks, "sharding": "hybrid"}
    if ranks == 1 and packing.merges is True:
        packing = replace(packing, **({"dp_merge": False} if packing.name == "slim" else {"sharers": 1}))
    if packing.name in ("wlb", "wlb_lazy"):
        packing = replace(packing, max_length=WINDOW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "STEPS", 6)
        for module in ("planner", "packing.rules"):
            patch.setattr(f"wlb_titan.{module}.is_ours", lambda cls: False)
        job = planner(packing, lengths, cost="quadratic:1,0.001", **arguments)
        job.hold_to_rules()
    assert job.iteration == 6


def test_wlb_leaves_no_short_document_behind():
    """Where micro-batches have no room beyond a window, the shortest would come last in every step."""
    lengths = np.random.default_rng(0).lognormal(np.log(0.2 * 512), 1, 2000).clip(1, 512).astype(int)
    packing = POLICIES.configure("wlb", thresholds=[384], max_length=512)
    job = planner(packing, lengths, window=512)
    late = [job.next().max_delay for _ in range(120)]
    assert PATIENCE <= max(late) <= PATIENCE + 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "context window is 0"),
        ({"micro_batches": 60}, "too few documents for the 60 micro-batches of one step: 50"),
        ({"micro_batches": 0}, "0 micro-batches"),
        ({"multiple": 3}, "must be a multiple of 3"),
        ({"packing": SHARED["dealt-2"]}, "2 of 1 data-parallel ranks cannot share"),
        ({"packing": SHARED["dealt-2"], "sharding": "ulysses", **SHARING}, "cannot share .* under ulysses"),
        ({"packing": replace(PACKINGS["wlb_lazy"], max_length=65), "multiple": 40}, "no room to pad"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_paragraph(changes, message):
    lengths = np.random.default_rng(9).integers(1, 90, 50)
    with pytest.raises(PlanError, match=message) as error:
        planner(**{"packing": PACKINGS["plain"], "lengths": lengths, **changes})
    assert "\n" not in str(error.value)


def test_a_queue_that_can_only_grow_is_warned_of():
    with pytest.warns(UserWarning, match="it will grow for ever"):
        planner(POLICIES.configure("wlb", thresholds=[2]), np.full(50, 10))
