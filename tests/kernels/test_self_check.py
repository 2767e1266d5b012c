"""The check before a job's first step sees what a broken kernel would leave; here the reference is broken."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import packed
from wlb_titan.kernels import reference, self_check
from wlb_titan.kernels.measure import Shape
from wlb_titan.kernels.options import Options
from wlb_titan.kernels.segments import Visibility

CPU = torch.device("cpu")
SHAPE = Shape(4, 2, 16, 24)
OPTIONS = Options(0.25)
SEGMENTS = {
    "documents": packed([129, 70, 1, 200]),
    "chunk": torch.tensor([[0, 128, 0, 700]], dtype=torch.int32),
}


class Broken:
    """The reference, with one result changed."""

    def __init__(self, name="", change=None):
        self.name, self.change = name, change

    def _changed(self, name, tensor):
        return self.change(tensor.clone()) if name == self.name else tensor

    def forward(self, *arguments):
        out, lse = reference.forward(*arguments)
        return self._changed("out", out), lse

    def backward(self, *arguments):
        names = "dq", "dk", "dv"
        found = zip(names, reference.backward(*arguments), strict=True)
        return tuple(self._changed(*one) for one in found)


def check(monkeypatch, segments, kernels, options=OPTIONS):
    monkeypatch.setattr(self_check, "configurations", lambda *arguments: {("forward",): segments})
    monkeypatch.setattr(self_check, "dispatch", kernels)
    return self_check.check_kernels(SHAPE, options, torch.float32, CPU)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_what_is_right_passes(monkeypatch, segments, window):
    """With a window most of a chunk's keys get no gradient at all."""
    error = check(monkeypatch, segments, Broken(), Options(0.25, Visibility(window=window)))
    assert error < 1e-5


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_rows_of_one_head_that_are_wrong_are_found(name, data):
    """64 rows of a head, left as they were, added twice or 10 % too large."""
    segments = data.draw(st.sampled_from([SEGMENTS["documents"][:1], SEGMENTS["chunk"]]))
    tokens = int(segments[0, 1 if name in ("out", "dq") else 3])
    first = 64 * data.draw(st.integers(0, tokens // 64 - 1))
    head = data.draw(st.integers(0, (4 if name in ("out", "dq") else 2) - 1))
    factor = data.draw(st.sampled_from([0.0, 2.0, 1.1, torch.nan]))

    def change(x):
        x[first : first + 64, head] *= factor
        return x

    with pytest.MonkeyPatch.context() as patch, pytest.raises(self_check.KernelError, match=f"^{name} is"):
        check(patch, segments, Broken(name, change))


def test_neighbours_are_looked_at(monkeypatch):
    """A gradient that reaches the next document: the first, the middle and the last one are compared."""

    def leak(dk):
        dk[-1] += dk[0]
        return dk

    with pytest.raises(self_check.KernelError, match="dk"):
        check(monkeypatch, SEGMENTS["documents"], Broken("dk", leak))


def test_a_launch_that_does_not_end(monkeypatch):
    class Never:
        def record(self):
            pass

        def query(self):
            return False

    monkeypatch.setattr(torch.cuda, "Event", Never)
    monkeypatch.setattr(self_check.dispatch, "current", lambda device: torch.no_grad())
    monkeypatch.setattr(self_check, "PATIENCE", 0.05)
    with pytest.raises(self_check.KernelError, match="has not ended"):
        self_check._wait(torch.device("cuda"))
