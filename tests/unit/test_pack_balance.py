"""How balanced policies are, and how long documents wait; benchmarks/packing.py measures it in full."""

import warnings
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
from planning import figures

from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.documents.mixture import Mixture
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError, quiet
from wlb_titan.job import Job
from wlb_titan.packing import POLICIES
from wlb_titan.packing.plain import Plain, imbalances
from wlb_titan.packing.wlb import Wlb, drains, tune
from wlb_titan.simulator import choice
from wlb_titan.simulator.choice import predicted


def lengths_of(kind):
    rng = np.random.default_rng(0)
    return {
        "log-normal": rng.lognormal(5.5, 1.0, 20_000).astype(np.int64) + 2,
        "heavy": (rng.pareto(1.2, 20_000) * 100).clip(2, 200_000).astype(np.int64),
        "uniform": rng.integers(2, 900, 20_000),
        "equal": np.full(20_000, 300),
        "longer than the window": np.full(2000, 9000),
    }[kind]


WORK = "quadratic:917504,3.96e10"  # LLaMA2-7B in FLOPs


def run(lengths, policy, window, micro_batches=8, steps=60, **settings):
    """The figures of a policy, with these settings, whose L_max no memory bounds."""
    packing = POLICIES.configure(policy, **settings)
    job = {"window": window, "cost": WORK, "memory_unknown": "a GPU without bounds"}
    return figures(lengths, steps, packing=packing, micro_batches=micro_batches, **job)


@pytest.mark.parametrize("window", [512, 4096, 65536])
@pytest.mark.parametrize("kind", ["log-normal", "heavy", "uniform", "equal", "longer than the window"])
def test_wlb_lazy_balances_at_least_as_well_as_plain(kind, window):
    plain, lazy = (run(lengths_of(kind), policy, window) for policy in ("plain", "wlb_lazy"))
    assert lazy["imbalance_mean"] <= plain["imbalance_mean"] + 1e-3


def test_wlb_lazy_is_plain_where_that_is_balanced_better_and_gives_back_what_waited():
    settings = {"micro_batches": 4, "window": 1024, "memory_unknown": "a GPU without bounds"}
    tokens = "quadratic:0,1"  # work is tokens, so windows of equal length are equal work

    def planner(policy, cost, **words):
        packing = POLICIES.configure(policy, cost_model=cost, **words)
        return Job(packing=packing, **settings).planner(Documents(lengths=lengths_of("heavy"), seed=1))

    lazy, plain = planner("wlb_lazy", tokens), planner("plain", tokens)
    for _ in range(3):
        assert [plan.imbalance for plan in (lazy.next(), plain.next())] == [1.0, 1.0]
    whole, given_back = planner("wlb_lazy", "quadratic:1,0", may_cut=False), planner("wlb_lazy", tokens)
    while not len(whole.policy.waiting):
        whole.next()
    first = min((id_, start) for id_, start, *_ in whole.policy.waiting.tolist())
    given_back.load_state_dict(whole.state_dict())
    assert tuple(given_back.next().micro_batches[0].documents[0, :2]) == first


def test_the_imbalance_of_plain_leaves_the_stream_where_it_is():
    stream = DocumentStream(Mixture(lengths_of("heavy"), seed=3), 512)
    job = Job(window=1024, micro_batches=4, packing=Plain.Config(cost_model="quadratic:1,100"))
    stream.fill(1000)
    state = stream.state_dict()
    found = imbalances(job.packing, stream, job.ask)
    assert stream.state_dict() == state
    assert found == imbalances(job.packing, stream.from_start(), job.ask)
    assert found[0] == found[1] > 1


def test_a_trial_plans_some_of_many_data_parallel_ranks():
    packing = Wlb.Config(cost_model="quadratic:1,100")
    job = Job(window=1024, micro_batches=192, degrees=Degrees(shard=96), packing=packing)
    stream = DocumentStream(Mixture(lengths_of("heavy"), seed=3), 512)
    assert job.ask.sample(64).micro_batches == 48
    assert [replace(job, degrees=Degrees(shard=n)).ask.sample(64).micro_batches for n in (1, 2)] == [64, 64]
    assert imbalances(Plain.Config(), stream, job.ask)[1] > 1
    assert len(Wlb(job.packing, stream, job.ask).next().packs) == 192


def test_wlb_says_when_queues_lose_and_not_when_they_win():
    with pytest.warns(UserWarning, match=r"Queues lose on these documents.*`plain` has 1\.0"):
        run(lengths_of("log-normal"), "wlb", 1024)
    with warnings.catch_warnings(action="error"):
        run(lengths_of("heavy"), "wlb", 65536)


def test_a_candidate_is_silent_and_planning_beside_it_is_not(monkeypatch):
    packing = POLICIES.configure("wlb", cost_model=WORK)
    job = Job(window=1024, micro_batches=8, memory_unknown="a GPU without bounds", packing=packing)
    documents = Documents(lengths=lengths_of("log-normal"), seed=0)
    with warnings.catch_warnings(action="error"):
        assert not predicted(job, job.policy, documents, 1, 0).problem
    beside = Thread(target=job.planner, args=(documents,))

    def simulated(*_):
        beside.start()
        beside.join()
        raise PlanError("enough")

    monkeypatch.setattr(choice, "simulate", simulated)
    with pytest.warns(UserWarning, match="Queues lose on these documents"):
        assert predicted(job, job.policy, documents, 1, 0).problem == "cannot run: enough"
    assert not quiet.get()


WINDOW = 131072


@pytest.fixture(scope="module")
def lengths():
    """Log-normal with a heavy tail cut off at the window."""
    rng = np.random.default_rng(1)
    lengths = np.exp(rng.normal(np.log(460), 1.3, 300_000))
    tail = rng.random(300_000) < 0.006
    low, high = 16384**-0.5, (8 * WINDOW) ** -0.5
    lengths[tail] = (low - rng.random(int(tail.sum())) * (low - high)) ** -2.0
    return np.clip(lengths.astype(np.int64), 16, WINDOW)


def test_plain_is_as_unbalanced_as_in_the_paper(lengths):
    assert run(lengths, "plain", WINDOW, 4, steps=400)["imbalance_mean"] == pytest.approx(1.44, abs=0.03)


@pytest.mark.long
def test_wlb_lazy_is_balanced_with_less_delay_than_wlb_also_with_many_micro_batches(lengths):
    wlb, lazy = (run(lengths, policy, WINDOW, 4, steps=600) for policy in ("wlb", "wlb_lazy"))
    assert wlb["imbalance_mean"] <= 1.05
    assert lazy["imbalance_mean"] <= 1.02
    assert lazy["delay_mean"] <= 0.32 and lazy["delay_mean"] < 0.8 * wlb["delay_mean"]
    assert lazy["delay_max"] <= 16
    many = run(lengths, "wlb_lazy", WINDOW, 64)
    assert many["imbalance_mean"] <= 1.02 and many["imbalance_p95"] <= 1.06 and many["delay_mean"] <= 0.42


def test_a_larger_packing_window_balances_better_and_delays(lengths):
    """The paper's Figure 6, in small."""
    rows = [run(lengths, "fixed_greedy", WINDOW, 4, steps=160, global_batches=n) for n in (1, 4, 8)]
    one, four, eight = (row["imbalance_mean"] for row in rows)
    assert one > four > eight
    assert [row["delay_mean"] for row in rows] == pytest.approx([0, 1.5, 3.5], abs=0.05)


@pytest.mark.parametrize("queues", [1, 2, 3])
@pytest.mark.long
def test_automatic_thresholds_are_found_again_drain_and_are_among_the_best(lengths, queues):
    """As Algorithm 1 itself has it: no other candidates cost much less in delay and imbalance."""
    packing = POLICIES.configure("wlb", queues=queues, cost_model=WORK)
    job = Job(window=WINDOW, micro_batches=4, packing=packing)
    found, again = (tune(packing, lengths[:50_000], WINDOW, 2 * WINDOW, job.ask) for _ in range(2))
    assert found == again == sorted(set(found)) and len(found) == queues
    assert drains(lengths, found, WINDOW)

    def cost(thresholds):
        found = run(lengths, "wlb", WINDOW, 4, steps=300, thresholds=thresholds)
        return found["delay_mean"] + ((found["imbalance_mean"] - 1) / 0.065) ** 2

    lowest = [WINDOW * (1 + number) // 8 for number in range(queues)]
    highest = [WINDOW * (8 - number) // 8 for number in reversed(range(queues))]
    assert cost(found) < min(cost(lowest), cost(highest))
