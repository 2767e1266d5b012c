"""`wlb` against a transcription of the paper's Algorithm 1, line by line and as slow as that is."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wlb_titan import bins
from wlb_titan.cost.workload import Quadratic, workload
from wlb_titan.documents.mixture import Mixture
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.job import Job
from wlb_titan.packing.wlb import Wlb
from wlb_titan.plan import ID, LENGTH, START

COST = Quadratic(1.0, 30.0)


class Document(NamedTuple):
    key: tuple
    length: int

    def Len(self):
        return self.length


class MicroBatch(list):
    Push = list.append

    def Len(self):
        return sum(Doc.Len() for Doc in self)

    def Work(self):
        return sum(float(workload(COST, np.array([Doc.Len()]))[0]) for Doc in self)


class Algorithm1:
    """Lines 1 to 37. `L_max` is exclusive here as in the pseudo-code."""

    def __init__(self, N, L_max, thresholds):
        self.N, self.L_max = N, L_max
        self.thresholds = thresholds
        self.Q = [[] for _ in thresholds]
        self.Remained_Doc = []  # 1

    def step(self, Cur_Batch):  # 2
        N, L_max = self.N, self.L_max
        Doc_Set = self.Remained_Doc  # 3
        self.Remained_Doc = []
        for Doc in Cur_Batch:  # 4
            if Doc.Len() >= self.thresholds[0]:  # 6: L_i <= Doc_len < L_{i+1}
                for i in reversed(range(len(self.Q))):
                    if Doc.Len() >= self.thresholds[i]:
                        self.Q[i].append(Doc)  # 7
                        break
            else:
                Doc_Set.append(Doc)  # 9
        for i, q in enumerate(self.Q):  # 12
            if len(q) >= N:  # 13
                Doc_Set += q[:N]  # 15
                self.Q[i] = q[N:]
        Doc_Set.sort(key=lambda Doc: -Doc.Len())  # 19
        New_Batch = [MicroBatch() for _ in range(N)]  # 21
        for Doc in Doc_Set:  # 22
            W_idx = min(range(N), key=lambda j: New_Batch[j].Work())  # 24
            L_idx = min(range(N), key=lambda j: New_Batch[j].Len())  # 25
            if New_Batch[W_idx].Len() + Doc.Len() < L_max:  # 26
                New_Batch[W_idx].Push(Doc)
            elif New_Batch[L_idx].Len() + Doc.Len() < L_max:  # 29
                New_Batch[L_idx].Push(Doc)
            else:
                self.Remained_Doc.append(Doc)  # 32
        return [[Doc.key for Doc in batch] for batch in New_Batch]  # 36


@st.composite
def jobs(draw):
    window = 64
    lengths = draw(st.lists(st.integers(2, 90).filter(lambda n: n != 65), min_size=20, max_size=80))
    thresholds = sorted(draw(st.sets(st.integers(20, window), min_size=1, max_size=3)))
    return {
        "lengths": np.array(lengths),
        "window": window,
        "micro_batches": draw(st.integers(2, 5)),
        "thresholds": thresholds,
        "max_length": draw(st.integers(window, 3 * window)),
    }


@pytest.mark.filterwarnings("ignore:With the thresholds")
@settings(max_examples=150)
@given(jobs())
def test_wlb_is_algorithm_1(job):
    stream = DocumentStream(Mixture(job["lengths"], seed=1), job["window"])
    arriving = DocumentStream(Mixture(job["lengths"], seed=1), job["window"])
    n = job["micro_batches"]
    packing = Wlb.Config(
        thresholds=job["thresholds"], max_length=job["max_length"], cost_model=f"quadratic:{COST.a},{COST.b}"
    )
    policy = Wlb(packing, stream, Job(window=job["window"], micro_batches=n, packing=packing))
    literal = Algorithm1(n, job["max_length"] + 1, job["thresholds"])
    surplus = 0
    for _ in range(12):
        # Behind a backlog the stream slows down, so that memory stays bounded; the paper knows no backlog.
        assume(sum(Doc.length for Doc in literal.Remained_Doc) <= n * job["window"])
        budget = n * job["window"] - surplus
        pieces = arriving.arrive(budget, lambda read: arriving.has_label(read).sum() >= n)
        surplus = int(pieces[:, LENGTH].sum()) - budget
        batch = [Document((id_, start), length) for id_, start, length in pieces.tolist()]
        expected = literal.step(batch)
        assume(
            all(expected)
        )  # of a step in which outliers leave a micro-batch empty the paper does not speak
        got = [[(row[ID], row[START]) for row in pack.documents.tolist()] for pack in policy.next().packs]
        assert got == expected


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 6), st.integers(50, 120))
def test_the_heaps_find_what_a_search_finds(lengths, n, max_length):
    lengths = -np.sort(-np.array(lengths))
    works = workload(COST, lengths)
    loads, filled, expected = [0.0] * n, [0] * n, []
    for length, work in zip(lengths.tolist(), works.tolist(), strict=True):
        choices = loads.index(min(loads)), filled.index(min(filled))
        fitting = [index for index in choices if filled[index] + length <= max_length]
        expected.append(fitting[0] if fitting else bins.REMAINS)
        if fitting:
            loads[fitting[0]] += work
            filled[fitting[0]] += length
    assert bins.pack_by_work(lengths, works, n, max_length).tolist() == expected


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([6, 4, 3, 3], [0, 1, 1, bins.REMAINS]), ([8, 8], [0, 1])],
    ids=["docstring", "documents of a window, where that is the bound"],
)
def test_by_hand(lengths, expected):
    lengths = np.array(lengths)
    assert bins.pack_by_work(lengths, lengths.astype(float), 2, 8).tolist() == expected
