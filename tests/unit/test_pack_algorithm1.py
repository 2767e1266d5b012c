"""`wlb` against a transcription of the paper's Algorithm 1, line by line and as slow as that is."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wlb_titan.cost.workload import Quadratic, workload
from wlb_titan.documents.mixture import Mixture
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.job import Job
from wlb_titan.packing.wlb import Wlb
from wlb_titan.plan import LENGTH

COST, WINDOW = Quadratic(1.0, 30.0), 64


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


@pytest.mark.filterwarnings("ignore:With the thresholds")
@settings(max_examples=150)
@given(
    lengths=st.lists(st.integers(2, 90).filter(lambda n: n != 65), min_size=20, max_size=80).map(np.array),
    n=st.integers(2, 5),
    thresholds=st.sets(st.integers(20, WINDOW), min_size=1, max_size=3),
    max_length=st.integers(WINDOW, 3 * WINDOW),
)
def test_wlb_is_algorithm_1(lengths, n, thresholds, max_length):
    stream, arriving = (DocumentStream(Mixture(lengths, seed=1), WINDOW) for _ in range(2))
    cost = f"quadratic:{COST.a},{COST.b}"
    packing = Wlb.Config(thresholds=sorted(thresholds), max_length=max_length, cost_model=cost)
    policy = Wlb(packing, stream, Job(window=WINDOW, micro_batches=n, packing=packing).ask)
    literal = Algorithm1(n, max_length + 1, sorted(thresholds))
    surplus = 0
    for _ in range(12):
        # Behind a backlog the stream slows down, so that memory stays bounded; the paper knows no backlog.
        assume(sum(Doc.length for Doc in literal.Remained_Doc) <= n * WINDOW)
        budget = n * WINDOW - surplus
        pieces = arriving.arrive(budget, lambda read: arriving.has_label(read).sum() >= n)
        surplus = int(pieces[:, LENGTH].sum()) - budget
        batch = [Document((id_, start), length) for id_, start, length in pieces.tolist()]
        expected = literal.step(batch)
        # Of a step in which outliers leave a micro-batch empty the paper does not speak.
        assume(all(expected))
        got = [list(map(tuple, pack.documents[:, :2].tolist())) for pack in policy.next().packs]
        assert got == expected  # the documents and the token that each begins at
